"""The public ports: sockets, routes, keys and limits before anything is parsed.

acceptor.py         accepts connections, and displaces strangers at the limit
http_server.py      uvicorn with limits of age, headers and unread responses
http_app.py         the routes, request ids, errors, CORS
http_stream.py      streamed responses, and client disconnects
request_body.py     limits of a body; json_structure.py: the limit on its values
openai_api.py       /v1/..., OpenAI's and Anthropic's
tokenize_api.py     /tokenize, /detokenize
grpc_api.py         GatewayService over gRPC
connect_api.py      the same service in the Connect protocol
site/               /, /docs, /openapi.json, /version
"""
