--- Requests a second: of all, by device class and by tenant.

local sliding_window = require("mirror.sliding_window")

local _M = {}
local Meter = {}
Meter.__index = Meter

_M.WINDOW_S = 5

--- `dict`: a shared dict; `clock`: a function of seconds.
function _M.new(dict, clock)
    local window = sliding_window.new(dict, "qps", _M.WINDOW_S, _M.WINDOW_S, clock)
    return setmetatable({ window = window }, Meter)
end

--- Count a request of `tenant`; the rate of all requests, this one included.
function Meter:arrive(tenant)
    self.window:add("tenant|" .. tenant, 1)
    return (self.window:add("all", 1)) / _M.WINDOW_S
end

--- Count a request that was routed to `class`.
function Meter:route(class)
    self.window:add("class|" .. class, 1)
end

function Meter:all()
    return self.window:sum("all") / _M.WINDOW_S
end

function Meter:of_class(class)
    return self.window:sum("class|" .. class) / _M.WINDOW_S
end

function Meter:of_tenant(tenant)
    return self.window:sum("tenant|" .. tenant) / _M.WINDOW_S
end

return _M
