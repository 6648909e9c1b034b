--- A stream of server-sent events on its way to the client: whole events only, and an error event
-- as the last one where the gateway was lost.

local sub, match = string.sub, string.match

local _M = {}
local EventStream = {}
EventStream.__index = EventStream

function _M.new()
    return setmetatable({ tail = "", is_open = false }, EventStream)
end

--- What of `chunk` to send now, and whether the gateway was lost.
-- nginx calls the body filter with an empty chunk that is not the last in two cases only: first of
-- all, to flush the headers, and when it gives up an upstream whose headers are out.
function EventStream:pass(chunk, is_last)
    local was_open = self.is_open
    self.is_open = true
    if chunk == "" and not is_last then
        return "", was_open
    end
    if self.tail ~= "" then
        chunk = self.tail .. chunk
        self.tail = ""
    end
    if is_last or sub(chunk, -2) == "\n\n" then
        return chunk, false
    end
    local events, tail = match(chunk, "^(.*\n\n)(.*)$")
    self.tail = tail or chunk
    return events or "", false
end

return _M
