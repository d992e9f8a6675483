-- Tell how much of a chain each live target holds, and how loaded it is. Writes nothing.
-- ARGV: concatenated 8-byte hashes of the chain; what the client knows of the targets: the stamp of
-- its roster, or nothing; the number of the last report in it; how many rows it has; and of each row
-- in turn its place, what is read of its layout ("<kind by group>:<margin>", or "-" for none, each
-- behind a space; nothing when all have none), its name behind two bytes of length, and a hint, four
-- bytes: how many blocks it held of an earlier chain that begins alike, or four bytes of 255; nothing
-- when there is none at all.
-- Returns {roster, number of the last report, reports, matched, loads, pending, on_gpu,
-- presences}:
--   roster      nothing when the client's holds, else {stamp, targets, epochs, places, layouts,
--               reports}; a place is a byte of shelf, and what members of the slot begin with behind
--               a byte of length
--   reports     target, report, ... as they were renewed since the one that the client knows, when
--               its roster holds
--   matched     four bytes for each row: how many blocks it holds; the hints for the next match
--   loads       of each live gateway: target, 8 bytes each of reserved tokens, blocks, requests, ...
--   pending     {row from 1 on, blocks} for each where blocks behind the matched ones are pending
--   on_gpu      four bytes for each row, what is matched on the gpu alone; '' where no host holds any
--   presences   {row, presence by group} for each with a layout, whose hit is the client's to tell
--               by the engine's own rule (kvindex/hit_rule.py)

local NO_HINT = 4294967295
local NO_STAMP = ''
local PLACE = 'BBc0'

-- Returns the stamp of the roster that holds now and the number of the last report. A roster holds
-- while no target came, went or changed its slot. Lapsed leases change it without a word, so there
-- is no stamp until they are reclaimed.
local function stamp_and_report()
  local stamp, report = unpack(call('HMGET', key('roster'), 'stamp', 'reports'))
  local lapsed = call('ZRANGEBYSCORE', key('leases'), '-inf', integer(now), 'LIMIT', 0, 1)
  return #lapsed == 0 and stamp or NO_STAMP, report or '0'
end

-- Note what members of each row begin with; returns the shelf of each.
local function note_places(num_rows, places)
  local found, shelf_by_row = { struct.unpack(string.rep(PLACE, num_rows), places) }, {}
  for row = 1, num_rows do
    shelf_by_row[row], prefixes[row] = found[2 * row - 1], found[2 * row]
  end
  return shelf_by_row
end

local function note_hints(num_rows, hints)
  local found = { struct.unpack('>' .. string.rep('I4', num_rows), hints) }
  for row = 1, num_rows do
    hinted[row] = found[row] ~= NO_HINT and math.min(found[row], length) or nil
  end
end

-- Returns the layouts of a roster as the client tells them.
local function told_layouts(heads)
  local layouts = {}
  for layout in string.gmatch(heads, '%S+') do
    layouts[#layouts + 1] = layout ~= '-' and layout
  end
  return layouts
end

local function told_targets(num_rows, names)
  local targets = { struct.unpack('>' .. string.rep('I2c0', num_rows), names) }
  targets[#targets] = nil
  return targets
end

-- Returns the roster that holds now, and its layouts.
local function read_roster(stamp)
  local targets = call('ZRANGEBYSCORE', key('leases'), '(' .. integer(now), '+inf')
  local roster, layouts = { stamp, targets }, {}
  for i, column in ipairs({ 'epochs', 'slots', 'layouts', 'reports' }) do
    roster[2 + i] = #targets > 0 and call('HMGET', key(column), unpack(targets)) or {}
  end
  for row, slot in ipairs(roster[4]) do
    local prefix = prefix_of(slot)
    roster[4][row] = struct.pack(PLACE, shelf_of(slot), #prefix, prefix)
    layouts[row] = roster[5][row] and string.match(roster[5][row], '^[^|]*')
  end
  return roster, layouts
end

-- Returns the rows without a layout by shelf, and the presences of the others.
local function shelves_and_presences(shelf_by_row, layouts)
  local shelves, presences = {}, {}
  for row, shelf in ipairs(shelf_by_row) do
    if layouts[row] then
      presences[#presences + 1] = layout_presence(row, shelf, layouts[row])
    else
      local rows = shelves[shelf]
      if rows then rows[#rows + 1] = row else shelves[shelf] = { row } end
    end
  end
  return shelves, presences
end

-- Returns four bytes for each row, 0 for those with a layout.
local function packed_lengths(num_rows, lengths)
  for row = 1, num_rows do
    lengths[row] = lengths[row] or 0
  end
  return struct.pack('>' .. string.rep('I4', num_rows), unpack(lengths))
end

local function pending_of(targets, matched)
  local pending = {}
  for row, pending_until in ipairs(call('HMGET', key('reserving'), unpack(targets))) do
    if pending_until and tonumber(pending_until) > now then
      local num_blocks = pending_run(targets[row], matched[row] or 0)
      if num_blocks > 0 then
        pending[#pending + 1] = { row, num_blocks }
      end
    end
  end
  return pending
end

-- Returns target, report, ... of the reports behind a number.
local function reports_since(number)
  local reports = {}
  local targets = call('ZRANGEBYSCORE', key('reported'), '(' .. number, '+inf')
  if #targets > 0 then
    for i, report in ipairs(call('HMGET', key('reports'), unpack(targets))) do
      reports[2 * i - 1], reports[2 * i] = targets[i], report
    end
  end
  return reports
end

local stamp, last_report = stamp_and_report()
local known_stamp, known_report, num_rows, places, heads, names, hints = unpack(ARGV, 2)
-- A server that took over without the last renewals counts from an earlier number.
local is_known = stamp ~= NO_STAMP and stamp == known_stamp
  and tonumber(last_report) >= tonumber(known_report)
local roster, layouts = {}, nil
if is_known then
  layouts = told_layouts(heads)
else
  roster, layouts = read_roster(stamp)
  num_rows, places, hints = #roster[2], table.concat(roster[4]), ''
end
num_rows = tonumber(num_rows)
local shelf_by_row = note_places(num_rows, places)
if hints ~= '' then
  note_hints(num_rows, hints)
end
local shelves, presences = shelves_and_presences(shelf_by_row, layouts)
local gpu, host = table_of(0, 'gpu'), table_of(0, 'host')
local matched, on_gpu = leading_blocks(shelves, filled({ gpu, host })), ''
if host.num_members > 0 then
  on_gpu = packed_lengths(num_rows, leading_blocks(shelves, filled({ gpu })))
end
local pending = {}
if next(live_gateways) and next(shelf_by_row) and call('EXISTS', key('reserving')) == 1 then
  pending = pending_of(is_known and told_targets(num_rows, names) or roster[2], matched)
end
return {
  roster, tonumber(last_report),
  is_known and last_report ~= known_report and reports_since(known_report) or {},
  packed_lengths(num_rows, matched), loads_of_gateways(), pending, on_gpu, presences,
}
