"""What Redis must do in one step, in Lua; the keys of a script share a hash slot. Redis 6 or newer, Valkey.

A namespace's generation fences every write: what a replica prepared before a purge is refused after it. A
snapshot is fenced by the lease and by its position too, so that a replica that was paused while it published
cannot put an old one over a newer.
"""

from __future__ import annotations

#: stream, generation | generation, length, field, payload -> position, or nil after a purge.
APPEND = """
local generation = redis.call('GET', KEYS[2])
if not generation then
  redis.call('SET', KEYS[2], ARGV[1])  -- Redis has lost its data; ours is as good as any
elseif generation ~= ARGV[1] then
  return false
end
return redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[2], '*', ARGV[3], ARGV[4])
"""

#: stream, generation, snapshot, tables, compactor | the generation that begins
#: The stream is emptied but stays: its positions must go on growing.
PURGE = """
redis.call('SET', KEYS[2], ARGV[1])
redis.call('DEL', KEYS[3], KEYS[4], KEYS[5])
redis.call('XTRIM', KEYS[1], 'MAXLEN', '0')
return redis.call('XADD', KEYS[1], '*', 'p', ARGV[1])
"""

#: compactor | owner, milliseconds -> whether the owner has it now.
TAKE_LEASE = """
local owner = redis.call('GET', KEYS[1])
if owner and owner ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""

#: upload | seconds, field, value, ... : an upload with its first fields, which expires from the first.
BEGIN_UPLOAD = """
redis.call('DEL', KEYS[1])
for at = 2, #ARGV, 2 do redis.call('HSET', KEYS[1], ARGV[at], ARGV[at + 1]) end
return redis.call('EXPIRE', KEYS[1], ARGV[1])
"""

#: upload | index, chunk -> whether the upload was still there. Plain HSET would bring an expired one back,
#: with neither its first fields nor an expiry.
ADD_CHUNK = """
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
return 1
"""

#: upload, snapshot, compactor, generation | owner, generation, ms, seq -> "ok" or what has come between.
PUBLISH = """
local function refuse(cause)
  redis.call('DEL', KEYS[1])
  return cause
end
if redis.call('GET', KEYS[3]) ~= ARGV[1] then return refuse('lease') end
if redis.call('GET', KEYS[4]) ~= ARGV[2] then return refuse('purged') end
if redis.call('EXISTS', KEYS[1]) == 0 then return 'late' end
local held = redis.call('HMGET', KEYS[2], 'generation', 'ms', 'seq')
if held[1] == ARGV[2] then
  local ms, seq = tonumber(held[2]), tonumber(held[3])
  if ms > tonumber(ARGV[3]) or (ms == tonumber(ARGV[3]) and seq > tonumber(ARGV[4])) then
    return refuse('newer')
  end
end
redis.call('RENAME', KEYS[1], KEYS[2])
redis.call('PERSIST', KEYS[2])
return 'ok'
"""

#: tables, generation | generation, format, observations, payload -> whether they were kept.
OFFER_TABLES = """
if redis.call('GET', KEYS[2]) ~= ARGV[1] then return 0 end
local held = redis.call('HGET', KEYS[1], 'n:' .. ARGV[2])
if held and tonumber(held) >= tonumber(ARGV[3]) then return 0 end
redis.call('HSET', KEYS[1], 'n:' .. ARGV[2], ARGV[3], 'p:' .. ARGV[2], ARGV[4])
return 1
"""
