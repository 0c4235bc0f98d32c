"""Code that seeds the random generators of a kernel again, in each language.

A clone has the memory of its source, and so the state of its generators. Without this, all clones
would draw the same numbers.
"""

PYTHON = "__import__('sys').modules['code_interpreter.python_kernel.seeds'].reseed();\n"
BASH = "RANDOM=$(od -An -N2 -tu2 /dev/urandom)"
R = "set.seed(NULL)"
# V8 cannot seed Math.random() again, so it is replaced (by sfc32), and Deno keeps the state of its
# cryptographic generator in the process, so it is not used.
JAVASCRIPT = """{
  const fill = (bytes) => {
    const file = Deno.openSync("/dev/urandom");
    for (let done = 0; done < bytes.length;) done += file.readSync(bytes.subarray(done));
    file.close();
  };
  const state = new Uint32Array(4);
  fill(new Uint8Array(state.buffer));
  let [a, b, c, d] = state;
  const next = () => {
    const sum = (a + b + d) | 0;
    d = (d + 1) | 0;
    a = b ^ (b >>> 9);
    b = (c + (c << 3)) | 0;
    c = (((c << 21) | (c >>> 11)) + sum) | 0;
    return sum >>> 0;
  };
  for (let step = 0; step < 12; step++) next();
  Math.random = () => ((next() >>> 5) * 67108864 + (next() >>> 6)) / 9007199254740992;
  const checked = Crypto.prototype.getRandomValues;
  crypto.getRandomValues = (array) => {
    checked.call(crypto, array);
    fill(new Uint8Array(array.buffer, array.byteOffset, array.byteLength));
    return array;
  };
  crypto.randomUUID = () => {
    const bytes = crypto.getRandomValues(new Uint8Array(16));
    bytes[6] = (bytes[6] & 15) | 64;
    bytes[8] = (bytes[8] & 63) | 128;
    const hex = Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
    return hex.replace(/^(.{8})(.{4})(.{4})(.{4})/, "$1-$2-$3-$4-");
  };
}"""
