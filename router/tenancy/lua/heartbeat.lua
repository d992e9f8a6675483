-- Renew the lease of a gateway.
-- ARGV: gateway, now, seconds. Returns {number of live gateways, 1 if its lease had not lapsed}.
-- Writes gateways.

local now = tonumber(ARGV[2])
redis.call('ZREMRANGEBYSCORE', key('gateways'), '-inf', integer(math.floor(now)))
local known = redis.call('ZSCORE', key('gateways'), ARGV[1]) and 1 or 0
redis.call('ZADD', key('gateways'), tostring(now + tonumber(ARGV[3])), ARGV[1])
return {redis.call('ZCARD', key('gateways')), known}
