-- Replace a claim by what was really used, and write the record of its usage; once per id.
-- ARGV: one msgpack map: id, now, tokens, day, month, scopes (a list), and where there is a usage
-- record: record (JSON), record_day, group (JSON [tenant, key, model]), sums (name -> number),
-- max_records, kept_days.
-- Returns 1, or 0 when it has been settled before. Writes claim:, window:, running:, spent:, usage,
-- totals:. An unknown claim is charged in full: it was made while this store was away.

local call = cmsgpack.unpack(ARGV[1])
local claim = key('claim', call.id)
local gateway, claimed, second, day, month, settled =
  unpack(redis.call('HMGET', claim, 'gateway', 'tokens', 'second', 'day', 'month', 'settled'))
if settled then
  return 0
end
redis.call('HSET', claim, 'settled', 1)
redis.call('EXPIRE', claim, SETTLED_TTL_S)
local difference = call.tokens - tonumber(claimed or '0')
for _, scope in ipairs(call.scopes) do
  local running_now = gateway and redis.call('HGET', key('running', scope), gateway)
  if running_now and tonumber(running_now) > 0 then
    redis.call('HINCRBY', key('running', scope), gateway, -1)
  end
  spend(scope, 'day', day or call.day, difference)
  spend(scope, 'month', month or call.month, difference)
  local name = key('window', scope)
  if difference > 0 then
    redis.call('HINCRBY', name, integer(math.floor(call.now)) .. 't', integer(difference))
    redis.call('EXPIRE', name, WINDOW_TTL_S)
  elseif second and redis.call('HEXISTS', name, second .. 't') == 1 then
    redis.call('HINCRBY', name, second .. 't', integer(difference))
  end
end
if call.record then
  redis.call('XADD', key('usage'), 'MAXLEN', '~', integer(call.max_records), '*', 'r', call.record)
  local totals = key('totals', call.record_day)
  for name, number in pairs(call.sums) do
    redis.call('HINCRBY', totals, name .. ':' .. call.group, integer(number))
  end
  redis.call('EXPIRE', totals, call.kept_days * 86400)
end
return 1
