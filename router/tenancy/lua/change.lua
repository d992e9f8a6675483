-- Change tenants, keys and admins: all of the writes, or none when the caller's directory is old.
-- ARGV: head that the caller knows, then for each write: kind (tenants, keys, admins), id, JSON or
-- '' to delete.
-- Returns 1, or 0 when the head is another. Writes head, tenants, keys, admins.

if head() == '' or head() ~= ARGV[1] then
  return 0
end
for i = 2, #ARGV, 3 do
  if ARGV[i + 2] == '' then
    redis.call('HDEL', key(ARGV[i]), ARGV[i + 1])
  else
    redis.call('HSET', key(ARGV[i]), ARGV[i + 1], ARGV[i + 2])
  end
end
redis.call('HINCRBY', key('head'), 'version', 1)
return 1
