// What is asked, and a tool and a schema which have one answer: the model is too small to choose.

export const USER = { role: "user", content: "Tell me a story about a fox." };
export const HELLO = { role: "user", content: "Hello!" };
export const PROMPT = "Once upon a time";

// Against white space without end, which JSON allows and the model likes.
export const TERSE = { temperature: 0, frequency_penalty: 2 };

export const PLACE = {
  type: "object",
  properties: { city: { type: "string", enum: ["Oslo"] } },
  required: ["city"],
  additionalProperties: false,
};

// The same as libraries of schemas have it, which the helpers of the package take.
export const PLACE_SCHEMA = {
  "~standard": {
    version: 1,
    vendor: "tests",
    validate: (value) =>
      value?.city === "Oslo"
        ? { value: { inCity: value.city } }
        : { issues: [{ message: "must be Oslo", path: ["city"] }] },
    jsonSchema: { input: () => PLACE },
  },
};

export const RESPONSE_FORMAT = {
  type: "json_schema",
  json_schema: { name: "place", schema: PLACE, strict: true },
};
export const TEXT_FORMAT = { type: "json_schema", name: "place", schema: PLACE, strict: true };

export const WEATHER = { name: "get_weather", description: "The weather.", parameters: PLACE };
export const TOOL = { type: "function", function: WEATHER };
export const NAMED = { type: "function", function: { name: WEATHER.name } };
export const RESPONSES_TOOL = { type: "function", strict: true, ...WEATHER };

export const gather = async (items) => {
  const gathered = [];
  for await (const item of items) gathered.push(item);
  return gathered;
};
