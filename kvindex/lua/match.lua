-- Tell how much of a chain each live target holds, and how loaded it is. Writes nothing.
-- ARGV: concatenated 8-byte hashes of the chain.
-- Returns four columns of the live targets {targets, epochs, reports, matched}, and a row for each
-- that has reservations {its place in the columns from 1 on, pending, tokens, blocks, requests}.
--
-- An inventory is prefix-closed (a block is held only while its parent is), so a target's longest
-- prefix is found by halving. One call asks all targets of a shelf that are still in the same
-- range, so the number of calls is that of the different answers times log2(length), rather than
-- of the targets; those without block 0 take part in one.

local chain = ARGV[1]
local length = #chain / HASH_BYTES
local now = now_ms()
local call = redis.call
local tables = full_attention_tables()
-- By row, which is a target's place in the answer.
local prefixes, shelves, matched = {}, {}, {}

-- Ask for some rows of one shelf, from `first` to `last`; adds them to `holders` or `others`.
local function ask_shelf(opened, digits, address, rows, first, last, holders, others)
  local members = {}
  for i = first, last do
    members[i - first + 1] = prefixes[rows[i]] .. digits
  end
  local flags = call('SMISMEMBER', bucket_of(opened, address), unpack(members))
  local num_holders, num_others = #holders, #others
  for i = 1, #flags do
    if flags[i] == 1 then
      num_holders = num_holders + 1
      holders[num_holders] = rows[first + i - 1]
    else
      num_others = num_others + 1
      others[num_others] = rows[first + i - 1]
    end
  end
end

-- Split rows, which are in the order of their shelves, into those that hold the block at
-- `position` and those that do not; both stay in that order.
local function split_rows(position, rows)
  local digits, last_nine = digits_of(chain, position * HASH_BYTES + 1)
  local holders, others = {}, rows
  for _, opened in ipairs(tables) do
    local asked, first = others, 1
    others = {}
    for i = 1, #asked do
      local shelf = shelves[asked[i]]
      if shelves[asked[i + 1]] ~= shelf then
        local address = address_of(last_nine, shelf)
        ask_shelf(opened, digits, address, asked, first, i, holders, others)
        first = i + 1
      end
    end
  end
  return holders, others
end

local function holds(row, position)
  local digits, last_nine = digits_of(chain, position * HASH_BYTES + 1)
  local address, member = address_of(last_nine, shelves[row]), prefixes[row] .. digits
  for _, opened in ipairs(tables) do
    if call('SISMEMBER', bucket_of(opened, address), member) == 1 then
      return true
    end
  end
  return false
end

-- Note what is matched by rows that all hold position `held` and of which none holds `missing`.
local function match_rows(rows, held, missing)
  while missing - held > 1 and #rows > 0 do
    local middle = math.floor((held + missing) / 2)
    if #rows > 1 then
      local holders, others = split_rows(middle, rows)
      match_rows(holders, middle, missing)
      rows, missing = others, middle
    elseif holds(rows[1], middle) then
      held = middle
    else
      missing = middle
    end
  end
  for _, row in ipairs(rows) do
    matched[row] = missing
  end
end

local live_gateways = {}
for _, gateway in ipairs(
  call('ZRANGEBYSCORE', key('gateways'), '(' .. integer(now), '+inf')) do
  live_gateways[gateway] = true
end

local function is_pending(target, id)
  local fields = call('HMGET', key('reservation', target, id), 'gateway', 'pending_until')
  return fields[1] and live_gateways[fields[1]] and tonumber(fields[2]) > now
end

local function pending_at(target, position)
  local hash = string.sub(chain, position * HASH_BYTES + 1, (position + 1) * HASH_BYTES)
  local page = 16
  for offset = 0, math.huge, page do
    local found = call(
      'ZRANGEBYLEX', key('pending', target), '[' .. hash, '+', 'LIMIT', offset, page)
    for _, member in ipairs(found) do
      if string.sub(member, 1, HASH_BYTES) ~= hash then
        return false
      elseif is_pending(target, string.sub(member, HASH_BYTES + 1)) then
        return true
      end
    end
    if #found < page then
      return false
    end
  end
end

-- The number of positions from `first` on that are pending, by halving.
local function pending_run(target, first)
  if first >= length or not pending_at(target, first) then
    return 0
  end
  local held, missing = first, length
  while missing - held > 1 do
    local middle = math.floor((held + missing) / 2)
    if pending_at(target, middle) then held = middle else missing = middle end
  end
  return held - first + 1
end

local function reserved(target)
  local sums = { tokens = 0, blocks = 0, requests = 0 }
  local load = call('HGETALL', key('load', target))
  for field = 1, #load, 2 do
    local gateway, what = string.match(load[field], '^(.*)|(%a+)$')
    if live_gateways[gateway] then
      sums[what] = sums[what] + tonumber(load[field + 1])
    end
  end
  return sums
end

local targets = call('ZRANGEBYSCORE', key('leases'), '(' .. integer(now), '+inf')
if #targets == 0 then
  return { {}, {}, {}, {}, {} }
end
local rows, loads = {}, {}
for i, slot in ipairs(call('HMGET', key('slots'), unpack(targets))) do
  rows[i], matched[i], prefixes[i], shelves[i] = i, 0, prefix_of(slot), shelf_of(slot)
end
table.sort(rows, function(left, right) return shelves[left] < shelves[right] end)
if length > 0 then
  match_rows(split_rows(0, rows), 0, length)
end
for i, is_reserving in ipairs(call('SMISMEMBER', key('reserving'), unpack(targets))) do
  if is_reserving == 1 then
    local target, sums = targets[i], reserved(targets[i])
    loads[#loads + 1] = {
      i, pending_run(target, matched[i]), sums.tokens, sums.blocks, sums.requests,
    }
  end
end
local epochs = call('HMGET', key('epochs'), unpack(targets))
local reports = call('HMGET', key('reports'), unpack(targets))
return { targets, epochs, reports, matched, loads }
