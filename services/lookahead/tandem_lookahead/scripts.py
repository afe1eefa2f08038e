"""Atomic operations in Redis, as Lua scripts. The keys of a script share a hash slot. Redis 6 or newer,
Valkey.

Every write checks the namespace's generation: what a replica prepared before a purge is refused after it. A
snapshot also needs the lease and a newer position, so that a replica that was paused while it published
cannot replace a newer one.
"""

from __future__ import annotations

#: stream, generation | generation, length, seconds, field, payload -> position, or nil after a purge.
APPEND = """
local generation = redis.call('GET', KEYS[2])
if not generation then
  redis.call('SET', KEYS[2], ARGV[1], 'EX', ARGV[3])  -- Redis lost its data; take ours
elseif generation ~= ARGV[1] then
  return false
end
local position = redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[2], '*', ARGV[4], ARGV[5])
if redis.call('TTL', KEYS[1]) < 0 then redis.call('EXPIRE', KEYS[1], ARGV[3]) end
return position
"""

#: stream | bytes, share. Drops the oldest entries of a stream that takes more bytes, but at most this share.
#: Without the right to MEMORY USAGE it drops none.
TRIM = """
local used = redis.pcall('MEMORY', 'USAGE', KEYS[1], 'SAMPLES', '0')
if type(used) ~= 'number' or used <= tonumber(ARGV[1]) then return 0 end
local kept = math.max(ARGV[1] / used, 1 - ARGV[2])
return redis.call('XTRIM', KEYS[1], 'MAXLEN', math.floor(redis.call('XLEN', KEYS[1]) * kept))
"""

#: stream, generation, snapshot | seconds : postpones the expiry of what is there.
RENEW = """
for _, key in ipairs(KEYS) do redis.call('EXPIRE', key, ARGV[1]) end
"""

#: stream, generation, snapshot, compactor | the generation that starts, seconds
#: Empties the stream but keeps it, because its ids must go on growing.
PURGE = """
redis.call('SET', KEYS[2], ARGV[1], 'EX', ARGV[2])
redis.call('DEL', KEYS[3], KEYS[4])
redis.call('XTRIM', KEYS[1], 'MAXLEN', '0')
redis.call('XADD', KEYS[1], '*', 'p', ARGV[1])
return redis.call('EXPIRE', KEYS[1], ARGV[2])
"""

#: compactor | owner, milliseconds -> whether the owner has it now.
TAKE_LEASE = """
local owner = redis.call('GET', KEYS[1])
if owner and owner ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""

#: upload | seconds, field, value, ... : creates an upload with its first fields and an expiry.
BEGIN_UPLOAD = """
redis.call('DEL', KEYS[1])
for at = 2, #ARGV, 2 do redis.call('HSET', KEYS[1], ARGV[at], ARGV[at + 1]) end
return redis.call('EXPIRE', KEYS[1], ARGV[1])
"""

#: upload | index, chunk -> whether the upload still existed. A plain HSET would create an expired one again,
#: without its first fields and without an expiry.
ADD_CHUNK = """
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
return 1
"""

#: upload, snapshot, compactor, generation | owner, generation, ms, seq, seconds -> "ok" or the cause of the
#: refusal. Replaces a damaged snapshot: pcall, because it may be no hash.
PUBLISH = """
local function refuse(cause)
  redis.call('DEL', KEYS[1])
  return cause
end
if redis.call('GET', KEYS[3]) ~= ARGV[1] then return refuse('lease') end
if redis.call('GET', KEYS[4]) ~= ARGV[2] then return refuse('purged') end
if redis.call('EXISTS', KEYS[1]) == 0 then return 'late' end
local held = redis.pcall('HMGET', KEYS[2], 'generation', 'ms', 'seq')
local ms, seq = tonumber(held[2] or nil), tonumber(held[3] or nil)
if held[1] == ARGV[2] and ms and seq then
  if ms > tonumber(ARGV[3]) or (ms == tonumber(ARGV[3]) and seq > tonumber(ARGV[4])) then
    return refuse('newer')
  end
end
redis.call('RENAME', KEYS[1], KEYS[2])
redis.call('EXPIRE', KEYS[2], ARGV[5])
return 'ok'
"""
