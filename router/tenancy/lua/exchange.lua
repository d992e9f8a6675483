-- Hear what other gateways say, tell them the same of this one, and divide the fleet's retries.
-- ARGV: one msgpack map: gateway, now, burst, earned, spent (totals since the gateway's start), says.
-- Returns {retries that this gateway may spend until it comes again, [gateway, what it says, ...]}.
-- Writes retries, granted, says. What is left of a gateway's grant is put back when it comes again, or
-- when its lease has lapsed: the one case in which a retry may be spent twice. A rule that is changed
-- here is changed in router/tenancy/limit_ledger.py too.

local call = cmsgpack.unpack(ARGV[1])
local is_live, number = {[call.gateway] = true}, 1
local names = redis.call('ZRANGEBYSCORE', key('gateways'), '(' .. tostring(call.now), '+inf')
for _, name in ipairs(names) do
  number = number + (is_live[name] and 0 or 1)
  is_live[name] = true
end

local left = tonumber(redis.call('GET', key('retries')) or tostring(call.burst))
local elsewhere = 0
local flat = redis.call('HGETALL', key('granted'))
for i = 1, #flat, 2 do
  local old = cmsgpack.unpack(flat[i + 1])
  if flat[i] == call.gateway then
    left = left + old.granted + call.earned - old.earned - call.spent + old.spent
  elseif is_live[flat[i]] then
    elsewhere = elsewhere + old.granted
  else
    left = left + old.granted
    redis.call('HDEL', key('granted'), flat[i])
    redis.call('HDEL', key('says'), flat[i])
  end
end
left = math.max(0, math.min(left, call.burst - elsewhere))
local granted = math.min(left, math.max(1, left / number))

redis.call('SET', key('retries'), tostring(left - granted), 'EX', RUNNING_TTL_S)
redis.call('HSET', key('granted'), call.gateway,
  cmsgpack.pack({granted = granted, earned = call.earned, spent = call.spent}))
redis.call('EXPIRE', key('granted'), RUNNING_TTL_S)
redis.call('HSET', key('says'), call.gateway, call.says)
redis.call('EXPIRE', key('says'), RUNNING_TTL_S)

local others = {}
flat = redis.call('HGETALL', key('says'))
for i = 1, #flat, 2 do
  if flat[i] ~= call.gateway and is_live[flat[i]] then
    others[#others + 1] = flat[i]
    others[#others + 1] = flat[i + 1]
  end
end
return {tostring(granted), others}
