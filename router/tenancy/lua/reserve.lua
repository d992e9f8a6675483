-- Count a claim in all of its scopes, or in none; once per id.
-- ARGV: one msgpack map: id, gateway, now, tokens, day, month, and scopes, a list of maps: scope, and
-- those of its limits that are set: parallel, requests, tokens, day, month.
-- Returns {head, [number of the scope that refused, kind, seconds to wait or ''], use of each scope}.
-- Writes claim:, window:, sums:, running:, spent:. A rule that is changed here is changed in
-- router/tenancy/limit_ledger.py too.

local call = cmsgpack.unpack(ARGV[1])
local now, tokens = call.now, call.tokens

local function first_exceeded(used, limits)
  local checks = {
    {'parallel', used.running + 1},
    {'requests', used.requests + 1},
    {'tokens', used.tokens + tokens},
    {'day', used.day + tokens},
    {'month', used.month + tokens},
  }
  for _, check in ipairs(checks) do
    local limit = limits[check[1]]
    if limit and check[2] > limit then
      return check[1], limit
    end
  end
end

-- Seconds until enough has left the window for the claim to fit; the window where it never fits.
local function wait_s(scope, used, kind, limit)
  local field = kind == 'requests' and 'r' or 't'
  local excess = (kind == 'requests' and used.requests + 1 or used.tokens + tokens) - limit
  local seconds, buckets = {}, window(scope, now)
  for second in pairs(buckets) do
    seconds[#seconds + 1] = second
  end
  table.sort(seconds)
  local freed = 0
  for _, second in ipairs(seconds) do
    freed = freed + buckets[second][field]
    if freed >= excess then
      return second + WINDOW_S + 1 - now
    end
  end
  return WINDOW_S
end

local function count(scope, used)
  local second = math.floor(now)
  used.newest = math.max(used.newest or second, second)
  window_add(scope, integer(second), 1, tokens, integer(used.newest))
  redis.call('HINCRBY', key('running', scope), call.gateway, 1)
  redis.call('EXPIRE', key('running', scope), RUNNING_TTL_S)
  spend(scope, 'day', call.day, tokens)
  spend(scope, 'month', call.month, tokens)
  used.requests, used.tokens = used.requests + 1, used.tokens + tokens
  used.running = used.running + 1
  used.day, used.month = used.day + tokens, used.month + tokens
end

local uses = {}
for i, limits in ipairs(call.scopes) do
  uses[i] = use(limits.scope, call.gateway, now, call.day, call.month)
end

local function answer(refusal)
  local flat = {}
  for i, used in ipairs(uses) do
    flat[i] = flat_use(used)
  end
  return {head(), refusal, flat}
end

local claim = key('claim', call.id)
if redis.call('EXISTS', claim) == 1 then
  return answer({})
end
for i, limits in ipairs(call.scopes) do
  local kind, limit = first_exceeded(uses[i], limits)
  if kind then
    local wait = (kind == 'requests' or kind == 'tokens') and wait_s(limits.scope, uses[i], kind, limit) or ''
    return answer({integer(i - 1), kind, tostring(wait)})
  end
end
for i, limits in ipairs(call.scopes) do
  count(limits.scope, uses[i])
end
redis.call('HSET', claim, 'gateway', call.gateway, 'tokens', integer(tokens),
  'second', integer(math.floor(now)), 'day', call.day, 'month', call.month)
redis.call('EXPIRE', claim, CLAIM_TTL_S)
return answer({})
