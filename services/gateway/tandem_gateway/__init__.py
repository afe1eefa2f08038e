"""The gateway: an OpenAI-compatible HTTP API and a gRPC API in front of the decode pods.

grpc_api / openai_api   authenticate and parse requests, render answers
gateway                 runs one request from admission to receipt
limits, shares          what a tenant may use, who is next under overload
admission, routing      decide when a request starts and on which pods
fleet, relay            track the health of the pods; stream from one of them
unloaded                which objectives the system keeps without load, for its operator
"""
