-- Fill a store that is empty, or that holds an older state of the same generation.
-- ARGV: generation, version, then for each record: kind, id, JSON.
-- Returns 1, or 0 when the store holds something newer or somebody else's. Writes head, tenants,
-- keys, admins.

local generation, version = unpack(redis.call('HMGET', key('head'), 'generation', 'version'))
if generation and (generation ~= ARGV[1] or tonumber(version or '0') >= tonumber(ARGV[2])) then
  return 0
end
redis.call('UNLINK', key('tenants'), key('keys'), key('admins'))
for i = 3, #ARGV, 3 do
  redis.call('HSET', key(ARGV[i]), ARGV[i + 1], ARGV[i + 2])
end
redis.call('HSET', key('head'), 'generation', ARGV[1], 'version', ARGV[2])
return 1
