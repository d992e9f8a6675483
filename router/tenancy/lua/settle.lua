-- Replace claims by what was really used, and write the records of their usage; once per id.
-- ARGV: for each claim one msgpack map: id, now, tokens, day, month, scopes (a list), and where there
-- is a usage record: record (JSON), record_day, group (JSON [tenant, key, model]), sums (name ->
-- number), max_records, kept_days.
-- Returns how many had not been settled before. Writes claim:, window:, sums:, running:, spent:,
-- usage, totals:. An unknown claim is charged in full: it was made while this store was away.

local function settle_scope(scope, call, gateway, second, day, month, difference)
  local running_now = gateway and redis.call('HGET', key('running', scope), gateway)
  if running_now and tonumber(running_now) > 0 then
    redis.call('HINCRBY', key('running', scope), gateway, -1)
  end
  spend(scope, 'day', day, difference)
  spend(scope, 'month', month, difference)
  if difference > 0 then
    local now, newest = math.floor(call.now), redis.call('HGET', key('sums', scope), 'newest')
    window_add(scope, integer(now), 0, difference, integer(math.max(tonumber(newest) or now, now)))
  elseif second and redis.call('HEXISTS', key('window', scope), second .. 't') == 1 then
    window_add(scope, second, 0, difference)
  end
end

local function write_record(call)
  redis.call('XADD', key('usage'), 'MAXLEN', '~', integer(call.max_records), '*', 'r', call.record)
  local totals = key('totals', call.record_day)
  for name, number in pairs(call.sums) do
    redis.call('HINCRBY', totals, name .. ':' .. call.group, integer(number))
  end
  redis.call('EXPIRE', totals, call.kept_days * 86400)
end

local function settle(call)
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
    settle_scope(scope, call, gateway, second, day or call.day, month or call.month, difference)
  end
  if call.record then
    write_record(call)
  end
  return 1
end

local number = 0
for _, packed in ipairs(ARGV) do
  number = number + settle(cmsgpack.unpack(packed))
end
return number
