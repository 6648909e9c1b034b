--- Loaded by busted before the specs: an `ngx` with a fixed clock, and globals that cannot be
-- written.

local fake_ngx = require("fake_ngx")

rawset(_G, "ngx", fake_ngx.new())

setmetatable(_G, {
    __newindex = function(_, name)
        error("write to the global " .. tostring(name), 2)
    end,
})
