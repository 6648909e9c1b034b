--- A stream of server-sent events on its way to the client: whole events only, and an error event
-- as the last one where the gateway was lost. `prompt_tokens` and `completion_tokens` are those
-- that the gateway told at the end, and nil before; `chunks` counts the writes of whole events,
-- each of a token or more.

local byte, sub, match = string.byte, string.sub, string.match

local _M = {}
local EventStream = {}
EventStream.__index = EventStream

function _M.new()
    return setmetatable({ tail = "", is_open = false, chunks = 0 }, EventStream)
end

-- A gateway ends a stream with a comment that is meant for the edge: its counts of tokens.
local function take_usage(self, chunk)
    local last = byte(chunk, -3)
    -- Nearly every chunk ends in a brace or bracket: only a digit is worth a look.
    if not last or last < 48 or last > 57 then
        return chunk
    end
    local events, prompt, completion = match(chunk, "^(.*): mirror%-usage (%d+) (%d+)\n\n$")
    if not events then
        return chunk
    end
    self.prompt_tokens, self.completion_tokens = tonumber(prompt), tonumber(completion)
    return events
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
    if sub(chunk, -2) == "\n\n" then
        self.chunks = self.chunks + 1
        return take_usage(self, chunk), false
    end
    if is_last then
        return chunk, false
    end
    local events, tail = match(chunk, "^(.*\n\n)(.*)$")
    self.tail = tail or chunk
    return events or "", false
end

return _M
