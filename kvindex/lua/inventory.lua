-- Put in front of the scripts that read or write inventories: the one place that knows their
-- layout (docs/decisions/0001-index-layout.md). Keys: see keyspace.lua.
--
-- One table per part (group and tier) holds the blocks of all targets of the pool, so that one
-- call asks about one block for many targets. An inventory is a slot, a small number; 32
-- neighbouring slots are a shelf. A block that is held is an integer of slot and hash, in the
-- bucket that hash and shelf choose: it is together with those of its shelf that hold the same
-- block, and a block that a large fleet shares does not fill one bucket alone.
--
-- The table is a linear hash table (Litwin, 1980) of sets: a set of at most 512 integers is a
-- sorted array in the server, 8 bytes each (set-max-intset-entries), and buckets are split one at
-- a time to stay far below that. No capacity is announced, and no script rebuilds a whole table.

local FILL = 128
local SHELF = 32
local MAX_SLOTS = 1842
local DIGITS = 16
local char, floor, format, unpack_bytes = string.char, math.floor, string.format, struct.unpack

-- Returns the digits of the 8-byte hash at byte `position`, and the last nine as a number. 53 bits
-- are kept, since a Lua number is exact up to there.
local function digits_of(hashes, position)
  local high, low = unpack_bytes('>I4I4', hashes, position)
  local number = high % 2097152 * 4294967296 + low
  return format('%016d', number), number % 1000000000
end

-- A member is its slot's prefix and the digits: an integer of 64 bits without a leading zero.
local function prefix_of(slot)
  slot = tonumber(slot)
  return slot <= MAX_SLOTS / 2 and tostring(slot) or tostring(MAX_SLOTS / 2 - slot)
end

local function shelf_of(slot)
  return math.floor((tonumber(slot) - 1) / SHELF)
end

-- Returns how far a shelf moves the address of a block: those of one block lie far apart.
local function shelf_shift(shelf)
  return shelf * 387420489
end

-- Returns what chooses the bucket.
local function address_of(last_nine, shelf)
  return (last_nine + shelf_shift(shelf)) % 1000000000
end

local function address_of_member(member)
  local prefix = tonumber(string.sub(member, 1, -1 - DIGITS))
  local slot = prefix > 0 and prefix or MAX_SLOTS / 2 - prefix
  return address_of(tonumber(string.sub(member, -9)), shelf_of(slot))
end

-- Returns the number of buckets when the table last was a power of two wide.
local function level_of(num_buckets)
  local level = 1
  while level * 2 <= num_buckets do
    level = level * 2
  end
  return level
end

-- Returns the table of a part; `changed` by inventory_add and inventory_remove, then closed.
local function open_table(part)
  local name = key('table', part)
  local sizes = redis.call('HMGET', name, 'buckets', 'members')
  local num_buckets = tonumber(sizes[1] or 1)
  return {
    name = name, prefix = key('held', part, ''), exists = sizes[1] and true,
    num_buckets = num_buckets, num_members = tonumber(sizes[2] or 0), level = level_of(num_buckets),
  }
end

local function close_table(opened, slot, change)
  opened.num_members = opened.num_members + change
  if opened.num_members == 0 then
    opened.num_buckets = 1
  end
  redis.call('HSET', opened.name, 'buckets', opened.num_buckets, 'members', opened.num_members)
  redis.call('HINCRBY', opened.name, '#' .. slot, change)
end

-- Returns the key of a bucket: its number as three bytes, which costs half of what digits do.
local function bucket_key(opened, bucket)
  return opened.prefix .. char(bucket % 256, floor(bucket / 256) % 256, floor(bucket / 65536))
end

local function bucket_of(opened, address)
  local bucket = address % (2 * opened.level)
  if bucket >= opened.num_buckets then
    bucket = bucket - opened.level
  end
  return bucket_key(opened, bucket)
end

-- Calls `command` on a set, in portions that Lua can pass; returns the number of changed members.
local function change_set(command, set, members)
  local changed = 0
  for first = 1, #members, CHUNK do
    local last = math.min(first + CHUNK - 1, #members)
    changed = changed + redis.call(command, set, unpack(members, first, last))
  end
  return changed
end

-- Calls `command` once per bucket that `hashes` touch; returns the number of changed members.
local function change_members(command, opened, slot, hashes)
  local by_bucket, prefix, shelf = {}, prefix_of(slot), shelf_of(slot)
  for position = 1, #hashes, HASH_BYTES do
    local digits, last_nine = digits_of(hashes, position)
    local bucket = bucket_of(opened, address_of(last_nine, shelf))
    local members = by_bucket[bucket]
    if members then
      members[#members + 1] = prefix .. digits
    else
      by_bucket[bucket] = { prefix .. digits }
    end
  end
  local changed = 0
  for bucket, members in pairs(by_bucket) do
    changed = changed + change_set(command, bucket, members)
  end
  return changed
end

-- Move the upper half of the next bucket in turn to a new one.
local function split(opened)
  local old, new = opened.num_buckets - opened.level, opened.num_buckets
  local members = redis.call('SMEMBERS', bucket_key(opened, old))
  local halves = { [old] = {}, [new] = {} }
  for _, member in ipairs(members) do
    local half = halves[address_of_member(member) % (2 * opened.level)]
    half[#half + 1] = member
  end
  redis.call('DEL', bucket_key(opened, old))
  for bucket, half in pairs(halves) do
    change_set('SADD', bucket_key(opened, bucket), half)
  end
  opened.num_buckets = new + 1
  opened.level = level_of(opened.num_buckets)
end

-- Make room for so many members more.
local function grow(opened, num_more)
  local wanted = math.ceil((opened.num_members + num_more) / FILL)
  if opened.num_members == 0 then
    opened.num_buckets = math.max(wanted, 1)
    opened.level = level_of(opened.num_buckets)
  end
  while opened.num_buckets < wanted do
    split(opened)
  end
end

local function inventory_add(slot, part, hashes)
  local opened = open_table(part)
  if not opened.exists then
    redis.call('SADD', key('parts'), part)
  end
  grow(opened, #hashes / HASH_BYTES)
  close_table(opened, slot, change_members('SADD', opened, slot, hashes))
end

local function inventory_remove(slot, part, hashes)
  local opened = open_table(part)
  if opened.exists then
    close_table(opened, slot, 0 - change_members('SREM', opened, slot, hashes))
  end
end

local function table_of(group, tier)
  return open_table(group .. ':' .. tier)
end

-- Returns those tables that hold anything.
local function filled(tables)
  local found = {}
  for i = 1, #tables do
    if tables[i].num_members > 0 then
      found[#found + 1] = tables[i]
    end
  end
  return found
end

-- Returns the tables of a group: a block on the gpu or on the host counts.
local function tables_of(group)
  return filled({ table_of(group, 'gpu'), table_of(group, 'host') })
end

-- Returns the numbers of blocks of each slot by tier, over all groups: {gpu = {[slot] = n}, host}.
local function inventory_sizes()
  local sizes = { gpu = {}, host = {} }
  for _, part in ipairs(redis.call('SMEMBERS', key('parts'))) do
    local of_tier = sizes[string.match(part, ':(%a+)$')]
    local fields = redis.call('HGETALL', key('table', part))
    for field = 1, #fields, 2 do
      local slot = string.match(fields[field], '^#(%d+)$')
      if slot then
        of_tier[slot] = (of_tier[slot] or 0) + tonumber(fields[field + 1])
      end
    end
  end
  return sizes
end
