// The built page goes into the package (deploy/console/static): `seqmesh` needs no node, and no network, to show it.
export default {
  base: "/",
  build: {
    outDir: "../static",
    emptyOutDir: true,
    target: "es2022",
    // No inline scripts and no data: URLs of scripts: the console's content security policy forbids them.
    modulePreload: false,
    assetsInlineLimit: 0,
    // What is built in asks that its licence goes with every copy.
    license: { fileName: "licenses.md" },
  },
};
