// The token of who has signed in. It is kept for this tab, and sent in a header: no cookie, nothing a foreign page could use.
const KEY = "seqmesh-console-token";

export function authorization(): Record<string, string> {
  const token = sessionStorage.getItem(KEY);
  return token ? { authorization: `Bearer ${token}` } : {};
}

export function hasToken(): boolean {
  return sessionStorage.getItem(KEY) !== null;
}

export function signOut(): void {
  sessionStorage.removeItem(KEY);
}

/** Keeps the token if the console takes it. */
export async function signIn(token: string): Promise<boolean> {
  const response = await fetch("/api/session", { headers: { authorization: `Bearer ${token}` }, cache: "no-store" });
  const { signed_in } = (await response.json()) as { signed_in: boolean };
  if (signed_in) sessionStorage.setItem(KEY, token);
  return signed_in;
}

/** Signs in with the token of the address that the console printed, and takes it out of the address bar. */
export async function signInByAddress(): Promise<void> {
  const token = new URLSearchParams(location.hash.slice(1)).get("token");
  if (!token) return;
  history.replaceState(null, "", location.pathname);
  await signIn(token);
}

/** Asks the console; throws an Error with its words if it refuses. */
export async function ask<T>(path: string, method = "GET"): Promise<T> {
  const response = await fetch(path, { method, headers: authorization(), cache: "no-store" });
  const body = (await response.json()) as T & { error?: string };
  if (!response.ok) throw new Error(body.error ?? `status ${response.status}`);
  return body;
}
