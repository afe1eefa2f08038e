"""Ships KV blocks from the pod that computed them to the pod that decodes with them.

`base` is the face that pods program against; `zeromq` and `inproc` are the transports behind it, both made of
`outgoing` (what to send), `incoming` (what to write) and `codec` (the messages).
"""
