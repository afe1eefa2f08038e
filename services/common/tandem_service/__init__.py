"""What every process shares: settings, logs, metrics, the gRPC server's life cycle, channels, discovery.

Imports gRPC and Prometheus but neither torch nor any model code, which the gateway and the lookahead
service do not need.
"""
