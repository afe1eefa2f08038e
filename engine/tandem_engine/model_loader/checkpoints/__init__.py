"""Quantized safetensors checkpoints, a module per format.

Each has `read(config, tensors)`: it finds the matrices of its format by their tensors' names, checks these
against each other from headers alone, and returns a `Matrix` for each, by the name that the weight has in the
unquantized model. source.py makes a WeightSource of them. What is computed from them is in stored.py.
"""
