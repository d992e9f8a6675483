-- Tell how much of a chain each live target holds, and how loaded it is. Writes nothing.
-- ARGV: concatenated 8-byte hashes of the chain; the hints that an earlier match on a chain which
-- begins alike has returned, or nothing.
-- Returns four columns of the live targets {targets, epochs, reports, matched}; a row for each that
-- has reservations {its place in the columns from 1 on, pending, tokens, blocks, requests}; a
-- column with what is matched on the gpu alone, empty where nothing is on a host; and a row for
-- each target with a layout {its place, layout, presence by group}, whose hit is the client's to
-- tell by the engine's own rule (kvindex/hit_rule.py); and hints for the next match, two bytes of
-- slot and four of prefix length for each target, which change no answer.
--
-- An inventory is prefix-closed (a block is held only while its parent is), so a target's longest
-- prefix is found by halving. One call asks all targets of a shelf that are still in the same
-- range, so the number of calls is that of the different answers times log2(length), rather than
-- of the targets; those without block 0 take part in one. Groups that do not hold whole chains are
-- read position by position.

local chain = ARGV[1]
local length = #chain / HASH_BYTES
local HINT_BYTES, HINT = 6, 'I2I4'
local FEW_ROWS = 3
local now = now_ms()
local call = redis.call
-- By row, which is a target's place in the answer.
local prefixes, slots = {}, {}
-- By slot: how many leading blocks were found there, at most as many as are asked for.
local hinted = {}
if ARGV[2] ~= '' then
  local known = { struct.unpack('>' .. string.rep(HINT, #ARGV[2] / HINT_BYTES), ARGV[2]) }
  for i = 1, #known - 1, 2 do
    hinted[known[i]] = math.min(known[i + 1], length)
  end
end

-- The shelf that is asked, as it moves the address of a block, and the tables that are read.
local shift, tables = 0, {}
local digits_by_position, last_nines = {}, {}

-- Returns the digits of the hash at a position from 0 on, and the last nine as a number.
local function digits_at(position)
  local digits = digits_by_position[position]
  if not digits then
    digits, last_nines[position] = digits_of(chain, position * HASH_BYTES + 1)
    digits_by_position[position] = digits
  end
  return digits, last_nines[position]
end

local function holds(row, position)
  local digits, last_nine = digits_at(position)
  local address, member = (last_nine + shift) % 1000000000, prefixes[row] .. digits
  for i = 1, #tables do
    if call('SISMEMBER', bucket_of(tables[i], address), member) == 1 then
      return true
    end
  end
  return false
end

-- What split_rows does, a look for each row: for up to three that is cheaper than one for all.
local function split_few_rows(position, rows)
  local holders, others = {}, {}
  for i = 1, #rows do
    local side = holds(rows[i], position) and holders or others
    side[#side + 1] = rows[i]
  end
  return holders, others
end

-- Split rows into those that hold the block at `position` and those that do not, in order.
local function split_rows(position, rows)
  if #rows <= FEW_ROWS then
    return split_few_rows(position, rows)
  end
  local digits, last_nine = digits_at(position)
  local address = (last_nine + shift) % 1000000000
  local holders, num_holders = {}, 0
  for t = 1, #tables do
    local members, others, num_others = {}, {}, 0
    for i = 1, #rows do
      members[i] = prefixes[rows[i]] .. digits
    end
    local flags = call('SMISMEMBER', bucket_of(tables[t], address), unpack(members))
    for i = 1, #flags do
      if flags[i] == 1 then
        num_holders = num_holders + 1
        holders[num_holders] = rows[i]
      else
        num_others = num_others + 1
        others[num_others] = rows[i]
      end
    end
    rows = others
    if num_others == 0 then
      break
    end
  end
  return holders, rows
end

-- Note in `matched` the prefix of rows that all hold position `held` and of which none holds
-- `missing`, by halving what is between.
local function match_rows(rows, held, missing, matched)
  while missing - held > 1 and #rows > 0 do
    local middle = math.floor((held + missing) / 2)
    if #rows > 1 then
      local holders, others = split_rows(middle, rows)
      match_rows(holders, middle, missing, matched)
      rows, missing = others, middle
    elseif holds(rows[1], middle) then
      held = middle
    else
      missing = middle
    end
  end
  for i = 1, #rows do
    matched[rows[i]] = missing
  end
end

-- Note in `matched` the prefix of rows of which nothing is known.
local function match_from_start(rows, matched)
  local holders, others = split_rows(0, rows)
  match_rows(holders, 0, length, matched)
  for i = 1, #others do
    matched[others[i]] = 0
  end
end

-- The same for rows of which an earlier match has found that they hold `last` blocks; those that
-- hold fewer now are added to `unknown`.
local function match_hinted(rows, last, matched, unknown)
  local exact, longer = rows, {}
  if last > 0 then
    local lost
    exact, lost = split_rows(last - 1, rows)
    for i = 1, #lost do
      unknown[#unknown + 1] = lost[i]
    end
  end
  if last < length and #exact > 0 then
    longer, exact = split_rows(last, exact)
  end
  for i = 1, #exact do
    matched[exact[i]] = last
  end
  match_rows(longer, last, length, matched)
end

-- The same for the rows of the shelf that is asked: first those with hints, by what these say.
local function match_shelf(rows, matched)
  local unknown, by_hint = {}, {}
  for i = 1, #rows do
    local last = hinted[slots[rows[i]]]
    local group = unknown
    if last then
      group = by_hint[last] or {}
      by_hint[last] = group
    end
    group[#group + 1] = rows[i]
  end
  for last, group in pairs(by_hint) do
    match_hinted(group, last, matched, unknown)
  end
  if #unknown > 0 then
    match_from_start(unknown, matched)
  end
end

-- Returns by row how many leading blocks are held in any of some tables; `shelves` are lists of
-- rows by the shelf that they stand on.
local function leading_blocks(shelves, of_tables)
  local matched = {}
  tables = of_tables
  for shelf, rows in pairs(shelves) do
    if length > 0 and #tables > 0 then
      shift = shelf_shift(shelf)
      match_shelf(rows, matched)
    else
      for i = 1, #rows do
        matched[rows[i]] = 0
      end
    end
  end
  return matched
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

-- Returns what a row holds of a group: a number of leading blocks for kind "f", else a digit for
-- each position, 1 where it is held.
local function group_presence(row, group, kind, last)
  tables = tables_of(group)
  if kind == 'f' then
    local matched = { [row] = 0 }
    if last > 0 and holds(row, 0) then
      match_rows({ row }, 0, last, matched)
    end
    return matched[row]
  end
  local bits = {}
  for position = 0, last - 1 do
    bits[position + 1] = holds(row, position) and '1' or '0'
  end
  return table.concat(bits)
end

-- Returns a row's place, its layout, and its presence by group. Groups that hold whole chains come
-- first, because no hit is longer than what they hold.
local function layout_presence(row, shelf, layout)
  local kinds, margin = string.match(layout, '^(%a+):(%d+)|')
  local presence, last = {}, length
  shift = shelf_shift(shelf)
  for group = 1, #kinds do
    presence[group] = 0
  end
  for group in string.gmatch(kinds, '()f') do
    presence[group] = group_presence(row, group - 1, 'f', length)
    last = math.min(last, presence[group] + tonumber(margin))
  end
  for group in string.gmatch(kinds, '()b') do
    presence[group] = group_presence(row, group - 1, 'b', last)
  end
  return { row, layout, presence }
end

local targets = call('ZRANGEBYSCORE', key('leases'), '(' .. integer(now), '+inf')
if #targets == 0 then
  return { {}, {}, {}, {}, {}, {}, {}, '' }
end
local layouts = call('EXISTS', key('layouts')) == 1 and call('HMGET', key('layouts'), unpack(targets))
local shelves, presences = {}, {}
for row, slot in ipairs(call('HMGET', key('slots'), unpack(targets))) do
  local shelf = shelf_of(slot)
  prefixes[row], slots[row] = prefix_of(slot), tonumber(slot)
  if layouts and layouts[row] then
    presences[#presences + 1] = layout_presence(row, shelf, layouts[row])
  else
    local rows = shelves[shelf] or {}
    rows[#rows + 1] = row
    shelves[shelf] = rows
  end
end
local gpu, host = table_of(0, 'gpu'), table_of(0, 'host')
local matched = leading_blocks(shelves, filled({ gpu, host }))
local has_host = host.num_members > 0
local on_gpu = has_host and leading_blocks(shelves, filled({ gpu })) or {}
for _, presence in ipairs(presences) do
  matched[presence[1]], on_gpu[presence[1]] = 0, has_host and 0 or nil
end
local loads = {}
for i, is_reserving in ipairs(call('SMISMEMBER', key('reserving'), unpack(targets))) do
  if is_reserving == 1 then
    local target, sums = targets[i], reserved(targets[i])
    loads[#loads + 1] = {
      i, pending_run(target, matched[i]), sums.tokens, sums.blocks, sums.requests,
    }
  end
end
local found = {}
for row = 1, #targets do
  found[2 * row - 1], found[2 * row] = slots[row], matched[row]
end
local hints = struct.pack('>' .. string.rep(HINT, #targets), unpack(found))
local epochs = call('HMGET', key('epochs'), unpack(targets))
local reports = call('HMGET', key('reports'), unpack(targets))
return { targets, epochs, reports, matched, loads, on_gpu, presences, hints }
