"""Parses requests from bytes and renders events as bytes, in each API's format, without sockets.

openai_models.py     bodies of chats and completions; openai_messages.py, openai_guides.py: their fields
fields.py            which fields are refused, without effect, or ignored with a header, by API
reasoning_hints.py   converts reasoning hints to variables of the chat template
openai_render.py     their answers, whole and streamed, with `usage`
chat_dialect.py      what the Responses API and the Messages API share
responses_*.py       OpenAI's Responses API, read and rendered as a chat
messages_*.py        Anthropic's Messages API, read and rendered as a chat
grpc_messages.py     messages, tools and options of the gRPC API
prompt_logprobs.py   prompts shown with their log probabilities, `echo`
json_body.py         the base of all bodies; sse.py: JSON bytes and server-sent events
"""
