-- Keep decisions of any gateway for a while, at most so many; the oldest make room.
-- KEYS[1] is the prefix of all keys: `<prefix>ids`, a LIST of request ids, oldest first, and
-- `<prefix>of:<id>`, a STRING, the record (JSON) of a request.
-- ARGV: ttl_ms, max_records, then id and record in turns.

local prefix, ttl_ms, max_records = KEYS[1], ARGV[1], tonumber(ARGV[2])
local ids = prefix .. 'ids'
for i = 3, #ARGV, 2 do
  redis.call('SET', prefix .. 'of:' .. ARGV[i], ARGV[i + 1], 'PX', ttl_ms)
  redis.call('RPUSH', ids, ARGV[i])
end
redis.call('PEXPIRE', ids, ttl_ms)
while redis.call('LLEN', ids) > max_records do
  redis.call('DEL', prefix .. 'of:' .. redis.call('LPOP', ids))
end
