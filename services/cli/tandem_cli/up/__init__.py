"""`tandem up`: the whole system on one machine.

options       options of the command
up_plan       processes, their flags and their ports
supervisor    starts the processes, and restarts those that die
health        asks a process whether it serves
redis_server  the Redis server
certificates  a CA and a certificate for each role
log_view      all logs as one stream
state_file    pids and ports of a running system
run           combines these
"""
