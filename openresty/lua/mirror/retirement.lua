--- When a worker of a configuration that has been replaced lets its clients go.
--
-- A reload ends the old workers 0.1 s after the new ones have started, and nginx then closes
-- connections that wait for a request even if one has just arrived on them (nginx before 1.27.4,
-- which has keepalive_min_timeout, has no remedy of its own). So an old worker, once the new ones
-- are there, says `Connection: close` with each answer, and its clients come back to the new ones.
-- A header cannot do that, nginx writes this one itself; a location without keep-alive can.

local _M = {}
local Retirement = {}
Retirement.__index = Retirement

--- `dict` outlives reloads. To be called once for each configuration, by the master.
function _M.new(dict)
    local generation = dict:incr("generations", 1, 0)
    return setmetatable({ dict = dict, generation = generation }, Retirement)
end

--- A worker of this configuration serves.
function Retirement:begin()
    self.dict:set("generation", self.generation)
end

--- Whether workers of another configuration serve.
function Retirement:is_due()
    local serving = self.dict:get("generation")
    return serving ~= nil and serving ~= self.generation
end

return _M
