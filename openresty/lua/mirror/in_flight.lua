--- How many requests are at a gateway, a device class or a tenant, in a shared dict.
--
-- All nginx workers see the counts. Each worker also counts what it holds itself: when one is
-- killed, the next to start gives that back.

local _M = {}
local InFlight = {}
InFlight.__index = InFlight

--- `pid`: a function that returns the id of this nginx worker.
function _M.new(dict, pid)
    return setmetatable({ dict = dict, pid = pid }, InFlight)
end

function InFlight:count(name)
    return self.dict:get("flight|" .. name) or 0
end

--- The count after adding `difference`. A count that a full dict has lost begins at 0 again, and
-- what was in it is not taken off once more: below 0 it would let in too many for ever.
function InFlight:add(name, difference)
    self.dict:incr("held|" .. self.pid() .. "|" .. name, difference, 0)
    local count = self.dict:incr("flight|" .. name, difference, 0) or 0
    if count < 0 then
        self.dict:incr("flight|" .. name, -count, 0)
        return 0
    end
    return count
end

--- Give back what nginx workers that are gone still hold; `is_alive(pid)` tells.
function InFlight:recover(is_alive)
    for _, key in ipairs(self.dict:get_keys(0)) do
        local pid, name = key:match("^held|(%d+)|(.+)$")
        if pid and not is_alive(tonumber(pid)) then
            -- Two workers may start at once: whoever adds the mark does the work.
            if self.dict:add("recovered|" .. key, true, 60) then
                self.dict:incr("flight|" .. name, -math.max(0, self.dict:get(key) or 0), 0)
                self.dict:delete(key)
            end
        end
    end
end

return _M
