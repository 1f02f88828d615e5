import { render } from "preact";
import { App } from "./app";
import { signInByAddress } from "./session";
import "./style.css";

await signInByAddress();
const root = document.getElementById("app");
if (root !== null) {
  root.replaceChildren();
  render(<App />, root);
}
