// Writes static/seal.json: which sources the built page belongs to. A test compares it, without node.
import { createHash } from "node:crypto";
import { readdirSync, readFileSync, statSync, writeFileSync } from "node:fs";
import { join, relative, sep } from "node:path";

function files(folder, root = folder) {
  return readdirSync(folder).flatMap((name) => {
    const path = join(folder, name);
    if (name === "node_modules" || name === "seal.json") return [];
    return statSync(path).isDirectory() ? files(path, root) : [relative(root, path).split(sep).join("/")];
  });
}

function digest(folder) {
  const hash = createHash("sha256");
  for (const path of files(folder).sort()) {
    const content = createHash("sha256").update(readFileSync(join(folder, path))).digest("hex");
    hash.update(`${path} ${content}\n`);
  }
  return hash.digest("hex");
}

const seal = { sources: digest("."), built: digest("../static") };
writeFileSync("../static/seal.json", JSON.stringify(seal, null, 2) + "\n");
