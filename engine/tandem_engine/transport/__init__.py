"""Sends KV blocks from the pod that computed them to the pod that decodes with them.

base      tickets, states and limits
outgoing  KVSender: what a prefill pod sends next
incoming  KVReceiver: what a decode pod writes into its pool
codec     the messages
zeromq    both ends over ZeroMQ
"""
