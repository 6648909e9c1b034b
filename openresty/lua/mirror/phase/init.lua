local edge = require("mirror.edge")
local sha256 = require("mirror.sha256")

return function(settings)
    edge.configure(settings, sha256)
end
