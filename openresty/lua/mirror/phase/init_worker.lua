local edge = require("mirror.edge")

local function is_alive(pid)
    local file = io.open("/proc/" .. pid .. "/stat")
    if file then
        file:close()
    end
    return file ~= nil
end

return function()
    edge.balancer:recover(is_alive)
end
