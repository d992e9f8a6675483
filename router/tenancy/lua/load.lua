-- Everything about tenants at one moment.
-- Returns {generation, version, tenants, keys, admins}, each of the last three flat; {} when the
-- store is empty. Writes nothing.

local generation, version = unpack(redis.call('HMGET', key('head'), 'generation', 'version'))
if not generation then
  return {}
end
return {
  generation, version or '0', redis.call('HGETALL', key('tenants')),
  redis.call('HGETALL', key('keys')), redis.call('HGETALL', key('admins')),
}
