"""The gateway: OpenAI-compatible HTTP APIs and a gRPC API in front of the decode pods.

edge        receives requests at the public ports, and sends answers
call        runs one request from its tokens to its receipt
answers     keeps the events of answers, so that cut streams can be resumed
dashboard   the live page
admission   decides when a request starts, or refuses it
dialects    parses and renders each API's format; tools: tool calls and reasoning in texts
fleet       the pods: health, load and routing
"""
