-- Extend the lease of a gateway.
-- ARGV: gateway, lease_ms. Writes gateways; forgets the reservations of gateways that lapsed (the
-- caller included: what it reserved before its lease lapsed does not come back).

local gateway, lease_ms = ARGV[1], tonumber(ARGV[2])
local now = now_ms()
for _, lapsed in ipairs(redis.call('ZRANGEBYSCORE', key('gateways'), '-inf', integer(now))) do
  for _, target in ipairs(redis.call('ZRANGE', key('leases'), 0, -1)) do
    forget_gateway(target, lapsed)
  end
  redis.call('UNLINK', key('load', lapsed))
  redis.call('ZREM', key('gateways'), lapsed)
end
redis.call('ZADD', key('gateways'), integer(now + lease_ms), gateway)
return 1
