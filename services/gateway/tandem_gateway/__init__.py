"""The front door: OpenAI's HTTP API and our gRPC API over the decode pods.

grpc_api / openai_api   parse, authenticate, render answers
gateway                 one request from admission to receipt
admission, routing      when, and on which pods
fleet, relay            which pods live; one stream to one of them
codec                   protobuf <-> the dataclasses of `request`
"""
