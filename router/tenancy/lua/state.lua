-- Put in front of every script of the state store: key names, and what a scope has used.
--
-- All keys begin with KEYS[1] = "pf:{state}:" (not a key itself, but in the slot of all of them).
-- <scope> is "tenant/<name>" or "key/<sha256 of the key>". Instants are seconds since the Unix
-- epoch on the clock of the gateway that calls: gateways' clocks must agree within a second.
--
--   head                 HASH    generation (who filled the store), version (of tenants and keys)
--   tenants              HASH    name -> TenantConfig (JSON)
--   keys                 HASH    sha256 of a key -> StoredKey (JSON)
--   admins               HASH    sha256 of an admin key -> StoredAdmin (JSON)
--   gateways             ZSET    gateway -> instant at which its lease lapses
--   retries              STRING  retries that no gateway has been granted
--   granted              HASH    gateway -> granted, earned, spent (msgpack)
--   says                 HASH    gateway -> what it tells the others (JSON)
--   window:<scope>       HASH    <second>r, <second>t: requests and tokens claimed in that second
--   sums:<scope>         HASH    r, t: what is in that window as of the second `cleared`; newest: its
--                                newest second, '' without one
--   running:<scope>      HASH    gateway -> requests that it has running
--   spent:<scope>:<p>    STRING  tokens charged in a day (2026-11-29) or month (2026-11)
--   claim:<id>           HASH    gateway, tokens, second, day, month; settled once it is
--   usage                STREAM  field r: UsageRecord (JSON)
--   totals:<day>         HASH    <name of the sum>:<JSON [tenant, key, model]> -> sum
--   audit                STREAM  field r: AuditRecord (JSON)

local PREFIX = KEYS[1]
local WINDOW_S = 60
local WINDOW_TTL_S = 130
local RUNNING_TTL_S = 86400
local CLAIM_TTL_S = 86400
local SETTLED_TTL_S = 1800
local PERIOD_TTL_S = {day = 3 * 86400, month = 33 * 86400}

local function key(...)
  return PREFIX .. table.concat({...}, ':')
end

-- Lua prints large numbers as 1e+14, which is no integer to the server.
local function integer(number)
  return string.format('%.0f', number)
end

local function head()
  local generation, version = unpack(redis.call('HMGET', key('head'), 'generation', 'version'))
  return generation and (generation .. ':' .. (version or '0')) or ''
end

-- The window of a scope: {second -> {requests, tokens}}. What has left it is deleted.
local function window(scope, now)
  local name = key('window', scope)
  local flat = redis.call('HGETALL', name)
  local buckets, gone = {}, {}
  for i = 1, #flat, 2 do
    local second = tonumber(string.sub(flat[i], 1, -2))
    if math.floor(now) - second > WINDOW_S then
      gone[#gone + 1] = flat[i]
    else
      buckets[second] = buckets[second] or {r = 0, t = 0}
      buckets[second][string.sub(flat[i], -1)] = tonumber(flat[i + 1])
    end
  end
  if #gone > 0 then
    redis.call('HDEL', name, unpack(gone))
  end
  return buckets
end

-- Requests, tokens and newest second (or false) of a scope's window. To add it up takes longer than
-- all else about a claim, so that is done once a second, by whoever comes first; gateways' clocks
-- agree within one.
local function in_window(scope, now)
  local name, this_second = key('sums', scope), math.floor(now)
  local r, t, newest, cleared = unpack(redis.call('HMGET', name, 'r', 't', 'newest', 'cleared'))
  local ahead_s = cleared and cleared - this_second
  if ahead_s == 0 or ahead_s == 1 then
    return tonumber(r), tonumber(t), tonumber(newest) or false
  end
  local requests, tokens, last = 0, 0, false
  for second, bucket in pairs(window(scope, now)) do
    requests, tokens = requests + bucket.r, tokens + bucket.t
    last = math.max(last or second, second)
  end
  redis.call('HSET', name, 'r', integer(requests), 't', integer(tokens),
    'newest', last and integer(last) or '', 'cleared', integer(this_second))
  redis.call('EXPIRE', name, WINDOW_TTL_S)
  return requests, tokens, last
end

-- Change what was claimed in a second, and the sums with it; `newest` is the newest second then.
local function window_add(scope, second, requests, tokens, newest)
  local name, sums = key('window', scope), key('sums', scope)
  if requests ~= 0 then
    redis.call('HINCRBY', name, second .. 'r', integer(requests))
    redis.call('HINCRBY', sums, 'r', integer(requests))
  end
  redis.call('HINCRBY', name, second .. 't', integer(tokens))
  redis.call('HINCRBY', sums, 't', integer(tokens))
  redis.call('EXPIRE', sums, WINDOW_TTL_S)
  if newest then
    redis.call('HSET', sums, 'newest', newest)
    redis.call('EXPIRE', name, WINDOW_TTL_S)
  end
end

-- How many requests of live gateways a scope has running. Those of others are forgotten.
local function running(scope, gateway, now)
  local name = key('running', scope)
  local flat = redis.call('HGETALL', name)
  local number = 0
  for i = 1, #flat, 2 do
    local lapses_at = flat[i] ~= gateway and redis.call('ZSCORE', key('gateways'), flat[i])
    if flat[i] == gateway or (lapses_at and tonumber(lapses_at) > now) then
      number = number + tonumber(flat[i + 1])
    else
      redis.call('HDEL', name, flat[i])
    end
  end
  return number
end

local function spent(scope, period)
  return tonumber(redis.call('GET', key('spent', scope, period)) or '0')
end

local function spend(scope, kind, period, tokens)
  local name = key('spent', scope, period)
  if redis.call('INCRBY', name, integer(tokens)) == tokens then  -- It may just have been made.
    redis.call('EXPIRE', name, PERIOD_TTL_S[kind])
  end
end

-- What a scope has used: requests, tokens, newest (second or false), running, day, month.
local function use(scope, gateway, now, day, month)
  local requests, tokens, newest = in_window(scope, now)
  return {
    requests = requests, tokens = tokens, newest = newest, running = running(scope, gateway, now),
    day = spent(scope, day), month = spent(scope, month),
  }
end

-- The same as the caller gets it: requests, tokens, newest second or '', running, day, month.
local function flat_use(used)
  return {
    integer(used.requests), integer(used.tokens), used.newest and integer(used.newest) or '',
    integer(used.running), integer(used.day), integer(used.month),
  }
end
