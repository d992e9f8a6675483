-- Put behind inventory.lua in match.lua: how many leading blocks of a chain are held, by row.
--
-- ARGV[1] is the chain, concatenated 8-byte hashes. A row is a target's place in the answer.
--
-- An inventory is prefix-closed (a block is held only while its parent is), so a target's longest
-- prefix is found by halving. One call asks all targets of a shelf that are still in the same
-- range, so the number of calls is that of the different answers times log2(length), rather than
-- of the targets; those without block 0 take part in one. Where an earlier match tells what a
-- target held, both sides of that are looked at first.

local chain = ARGV[1]
local length = #chain / HASH_BYTES
local FEW_ROWS = 3
local call = redis.call
-- By row: what the members of its inventory begin with, and how many leading blocks an earlier
-- match has found, at most `length`, nil where none has.
local prefixes, hinted = {}, {}
-- The shelf that is asked, as it moves the address of a block, and the tables that are read.
local shift, tables = 0, {}

local function holds(row, position)
  local digits, last_nine = digits_of(chain, position * HASH_BYTES + 1)
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
  local digits, last_nine = digits_of(chain, position * HASH_BYTES + 1)
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

-- Returns the prefix of a row that holds position `held` and not `missing`, by halving.
local function match_row(row, held, missing)
  while missing - held > 1 do
    local middle = math.floor((held + missing) / 2)
    if holds(row, middle) then held = middle else missing = middle end
  end
  return missing
end

-- Note in `matched` the prefix of rows that all hold position `held` and of which none holds
-- `missing`, by halving what is between.
local function match_rows(rows, held, missing, matched)
  while missing - held > 1 and #rows > 1 do
    local middle = math.floor((held + missing) / 2)
    local holders, others = split_rows(middle, rows)
    match_rows(holders, middle, missing, matched)
    rows, missing = others, middle
  end
  if #rows == 1 then
    matched[rows[1]] = match_row(rows[1], held, missing)
    return
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

-- Returns the prefix of a row that held `last` blocks, nil when it holds fewer now.
local function match_hinted_row(row, last)
  if last > 0 and not holds(row, last - 1) then
    return nil
  elseif last < length and holds(row, last) then
    return match_row(row, last, length)
  end
  return last
end

-- Note in `matched` the prefix of rows that held `last` blocks; those that hold fewer now are
-- added to `unknown`.
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
    local row = rows[i]
    local last = hinted[row]
    if last then
      local group = by_hint[last]
      if group then group[#group + 1] = row else by_hint[last] = { row } end
    else
      unknown[#unknown + 1] = row
    end
  end
  for last, group in pairs(by_hint) do
    if #group > 1 then
      match_hinted(group, last, matched, unknown)
    else
      local row = group[1]
      matched[row] = match_hinted_row(row, last)
      if not matched[row] then
        unknown[#unknown + 1] = row
      end
    end
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

-- Returns what a row holds of a group: a number of leading blocks for kind "f", else a digit for
-- each position, 1 where it is held.
local function group_presence(row, group, kind, last)
  tables = tables_of(group)
  if kind == 'f' then
    return last > 0 and holds(row, 0) and match_row(row, 0, last) or 0
  end
  local bits = {}
  for position = 0, last - 1 do
    bits[position + 1] = holds(row, position) and '1' or '0'
  end
  return table.concat(bits)
end

-- Returns a row and its presence by group, `kinds` and margin of its layout as redis_layout.py
-- packs them. Groups that hold whole chains come first: no hit is longer than what they hold.
local function layout_presence(row, shelf, layout)
  local kinds, margin = string.match(layout, '^(%a+):(%d+)$')
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
  return { row, presence }
end
