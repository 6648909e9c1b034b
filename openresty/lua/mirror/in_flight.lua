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

--- The count after adding `difference`.
function InFlight:add(name, difference)
    self.dict:incr("held|" .. self.pid() .. "|" .. name, difference, 0)
    return self.dict:incr("flight|" .. name, difference, 0) or 0
end

--- Give back what nginx workers that are gone still hold; `is_alive(pid)` tells.
function InFlight:recover(is_alive)
    for _, key in ipairs(self.dict:get_keys(0)) do
        local pid, name = key:match("^held|(%d+)|(.+)$")
        if pid and not is_alive(tonumber(pid)) then
            -- Two workers may start at once: whoever adds the mark does the work.
            if self.dict:add("recovered|" .. key, true, 60) then
                self.dict:incr("flight|" .. name, -(self.dict:get(key) or 0), 0)
                self.dict:delete(key)
            end
        end
    end
end

return _M
