-- Put in front of the scripts that read or write inventories: the one place that knows their
-- layout. Keys: see keyspace.lua. UNLINK frees big sets outside the server's main thread.

local function part_key(target, gen, part)
  return key('held', target, gen, part)
end

local function inventory_add(target, gen, part, hashes)
  local held = part_key(target, gen, part)
  redis.call('SADD', key('parts', target, gen), part)
  each_chunk(hashes, function(members) redis.call('SADD', held, unpack(members)) end)
end

local function inventory_remove(target, gen, part, hashes)
  local held = part_key(target, gen, part)
  each_chunk(hashes, function(members) redis.call('SREM', held, unpack(members)) end)
end

local function inventory_drop(target, gen)
  local parts = key('parts', target, gen)
  for _, part in ipairs(redis.call('SMEMBERS', parts)) do
    redis.call('UNLINK', part_key(target, gen, part))
  end
  redis.call('UNLINK', parts)
end

-- Returns a function position -> held?, over the full-attention group on gpu or host.
local function inventory_reader(target, gen, hash_at)
  local tiers = {}
  for _, part in ipairs({ '0:gpu', '0:host' }) do
    local held = part_key(target, gen, part)
    if redis.call('EXISTS', held) == 1 then
      tiers[#tiers + 1] = held
    end
  end
  return function(position)
    for _, held in ipairs(tiers) do
      if redis.call('SISMEMBER', held, hash_at(position)) == 1 then
        return true
      end
    end
    return false
  end
end

-- Returns the number of blocks by tier, over all groups.
local function inventory_size(target, gen)
  local sizes = { gpu = 0, host = 0 }
  for _, part in ipairs(redis.call('SMEMBERS', key('parts', target, gen))) do
    local tier = string.match(part, ':(%a+)$')
    sizes[tier] = sizes[tier] + redis.call('SCARD', part_key(target, gen, part))
  end
  return sizes
end
