"""What every pod shares: settings, logs, metrics, the gRPC server's life cycle, channels, discovery.

Knows the wire (gRPC, Prometheus) but neither torch nor any model, so that the gateway and the
lookahead service stay light.
"""
