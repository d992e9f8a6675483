-- Tell how much of a chain each live target holds, and how loaded it is. Writes nothing.
-- ARGV: concatenated 8-byte hashes of the chain; the hints that an earlier match on a chain which
-- begins alike has returned, or nothing; and what the client knows of the targets: the stamp of
-- its roster, or nothing; the number of the last report in it; and of each row in turn the slot (2
-- bytes), what is read of its layout ("<kind by group>:<margin>", or "-" for none, each behind a
-- space; nothing when all have none), and its name behind two bytes of length.
-- Returns {roster, number of the last report, reports, hints, loads, pending, on_gpu,
-- presences}:
--   roster      nothing when the client's holds, else {stamp, targets, epochs, slots, layouts,
--               reports}
--   reports     target, report, ... as they were renewed since the one that the client knows, when
--               its roster holds
--   hints       two bytes of slot and four of matched blocks for each row: the answer, and hints
--               for the next match, which change no answer
--   loads       of each live gateway: target, 8 bytes each of reserved tokens, blocks, requests, ...
--   pending     {row from 1 on, blocks} for each where blocks behind the matched ones are pending
--   on_gpu      four bytes for each row, what is matched on the gpu alone; '' where no host holds any
--   presences   {row, presence by group} for each with a layout, whose hit is the client's to tell
--               by the engine's own rule (kvindex/hit_rule.py)

local HINT_BYTES, HINT = 6, 'I2I4'
local NO_STAMP = ''

-- Returns the stamp of the roster that holds now and the number of the last report. A roster holds
-- while no target came, went or changed its slot. Lapsed leases change it without a word, so there
-- is no stamp until they are reclaimed.
local function stamp_and_report()
  local stamp, report = unpack(call('HMGET', key('roster'), 'stamp', 'reports'))
  local lapsed = call('ZRANGEBYSCORE', key('leases'), '-inf', integer(now), 'LIMIT', 0, 1)
  return #lapsed == 0 and stamp or NO_STAMP, report or '0'
end

-- Returns the slots and layouts of a roster as the client tells them.
local function told_rows()
  local slots, layouts = { struct.unpack('>' .. string.rep('I2', #ARGV[5] / 2), ARGV[5]) }, {}
  slots[#slots] = nil
  for layout in string.gmatch(ARGV[6], '%S+') do
    layouts[#layouts + 1] = layout ~= '-' and layout
  end
  return slots, layouts
end

local function told_targets(num_rows)
  local targets = { struct.unpack('>' .. string.rep('I2c0', num_rows), ARGV[7]) }
  targets[#targets] = nil
  return targets
end

-- Returns the roster that holds now, its slots and layouts.
local function read_roster(stamp)
  local targets = call('ZRANGEBYSCORE', key('leases'), '(' .. integer(now), '+inf')
  local roster, slots, layouts = { stamp, targets }, {}, {}
  for i, column in ipairs({ 'epochs', 'slots', 'layouts', 'reports' }) do
    roster[2 + i] = #targets > 0 and call('HMGET', key(column), unpack(targets)) or {}
  end
  for row, slot in ipairs(roster[4]) do
    slots[row] = tonumber(slot)
    layouts[row] = roster[5][row] and string.match(roster[5][row], '^[^|]*')
  end
  return roster, slots, layouts
end

-- Note what members of each row begin with, and what the hints say of it.
local function note_rows(slots)
  local found = {}
  if ARGV[2] ~= '' then
    local hints = { struct.unpack('>' .. string.rep(HINT, #ARGV[2] / HINT_BYTES), ARGV[2]) }
    for i = 1, #hints - 1, 2 do
      found[hints[i]] = hints[i + 1]
    end
  end
  for row, slot in ipairs(slots) do
    prefixes[row] = prefix_of(slot)
    hinted[row] = found[slot] and math.min(found[slot], length)
  end
end

-- Returns the rows without a layout by shelf, and the presences of the others.
local function shelves_and_presences(slots, layouts)
  local shelves, presences = {}, {}
  for row, slot in ipairs(slots) do
    local shelf = shelf_of(slot)
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

local function packed_hints(slots, matched)
  local hints = {}
  for row, slot in ipairs(slots) do
    hints[2 * row - 1], hints[2 * row] = slot, matched[row] or 0
  end
  return struct.pack('>' .. string.rep(HINT, #slots), unpack(hints))
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
-- A server that took over without the last renewals counts from an earlier number.
local is_known = stamp ~= NO_STAMP and stamp == ARGV[3]
  and tonumber(last_report) >= tonumber(ARGV[4])
local roster, slots, layouts = {}, nil, nil
if is_known then
  slots, layouts = told_rows()
else
  roster, slots, layouts = read_roster(stamp)
end
note_rows(slots)
local shelves, presences = shelves_and_presences(slots, layouts)
local gpu, host = table_of(0, 'gpu'), table_of(0, 'host')
local matched, on_gpu = leading_blocks(shelves, filled({ gpu, host })), ''
if host.num_members > 0 then
  on_gpu = packed_lengths(#slots, leading_blocks(shelves, filled({ gpu })))
end
local pending = {}
if #slots > 0 and call('EXISTS', key('reserving')) == 1 then
  pending = pending_of(is_known and told_targets(#slots) or roster[2], matched)
end
return {
  roster, tonumber(last_report),
  is_known and last_report ~= ARGV[4] and reports_since(ARGV[4]) or {},
  packed_hints(slots, matched), loads_of_gateways(), pending, on_gpu, presences,
}
