//! Finds I/O and other forbidden items in the source of a core, by its tokens.
//!
//! The standard library is allowed module by module, so that a new module is forbidden until it is
//! reviewed. Comments, string literals and items under `#[cfg(test)]` do not count.

use proc_macro2::{Delimiter, TokenStream, TokenTree};

/// Modules of the standard library without effects on the outside world.
const MODULES: [&str; 36] = [
    "any",
    "array",
    "ascii",
    "assert_matches",
    "borrow",
    "boxed",
    "cell",
    "char",
    "clone",
    "cmp",
    "collections",
    "convert",
    "debug_assert",
    "default",
    "error",
    "f64",
    "fmt",
    "hash",
    "hint",
    "i64",
    "iter",
    "marker",
    "mem",
    "num",
    "ops",
    "option",
    "rc",
    "result",
    "slice",
    "str",
    "string",
    "u16",
    "u32",
    "u64",
    "vec",
    "write",
];

/// Modules of which only these items are allowed.
const PARTS: [(&str, &[&str]); 4] = [
    (
        "io",
        &[
            "self",
            "Cursor",
            "Error",
            "ErrorKind",
            "Read",
            "Result",
            "Write",
        ],
    ),
    // Addresses, which are data; nothing that opens a socket or resolves a name.
    (
        "net",
        &["self", "IpAddr", "Ipv4Addr", "Ipv6Addr", "SocketAddr"],
    ),
    ("sync", &["self", "Arc"]),
    ("time", &["self", "Duration"]),
];

/// Crates whose purpose is I/O.
const CRATES: [&str; 16] = [
    "async_std",
    "crossbeam",
    "futures",
    "futures_util",
    "getrandom",
    "hyper",
    "libc",
    "mio",
    "nix",
    "quinn",
    "rand",
    "rayon",
    "rustix",
    "smol",
    "socket2",
    "tokio",
];

const MACROS: [&str; 6] = [
    "dbg",
    "eprint",
    "eprintln",
    "print",
    "println",
    "thread_local",
];
const KEYWORDS: [&str; 3] = ["async", "await", "extern"];

/// Returns the forbidden items of a source file.
pub fn findings(source: &str) -> Result<Vec<String>, String> {
    let tokens: TokenStream = source
        .parse()
        .map_err(|error| format!("no tokens: {error}"))?;
    let mut findings = Vec::new();
    scan(tokens, &[], &mut findings);
    Ok(findings)
}

/// Returns the modules that a file declares for its tests only.
pub fn test_modules(source: &str) -> Vec<String> {
    let tokens: Vec<TokenTree> = source
        .parse()
        .into_iter()
        .flat_map(|t: TokenStream| t)
        .collect();
    let mut modules = Vec::new();
    for index in 0..tokens.len() {
        let end = item_end(&tokens, index);
        let item = &tokens[index..end];
        let declared = item
            .iter()
            .skip_while(|token| ident(token).as_deref() != Some("mod"));
        if is_test_attribute(&tokens, index)
            && item.last().is_some_and(|token| punct(token) == Some(';'))
            && let Some(name) = declared.skip(1).find_map(ident)
        {
            modules.push(name);
        }
    }
    modules
}

fn ident(token: &TokenTree) -> Option<String> {
    match token {
        TokenTree::Ident(ident) => Some(ident.to_string()),
        _ => None,
    }
}

fn punct(token: &TokenTree) -> Option<char> {
    match token {
        TokenTree::Punct(punct) => Some(punct.as_char()),
        _ => None,
    }
}

/// Returns whether `#[cfg(test)]` is at `index`.
fn is_test_attribute(tokens: &[TokenTree], index: usize) -> bool {
    let (Some(hash), Some(TokenTree::Group(group))) = (tokens.get(index), tokens.get(index + 1))
    else {
        return false;
    };
    let text: String = group.stream().to_string().split_whitespace().collect();
    punct(hash) == Some('#') && group.delimiter() == Delimiter::Bracket && text == "cfg(test)"
}

/// Returns the end of the item at `index`: after its first block or semicolon.
fn item_end(tokens: &[TokenTree], index: usize) -> usize {
    let ends = |token: &TokenTree| match token {
        TokenTree::Group(group) => group.delimiter() == Delimiter::Brace,
        other => punct(other) == Some(';'),
    };
    let length = tokens[index..].iter().position(ends);
    length.map_or(tokens.len(), |length| index + length + 1)
}

/// Scans tokens; `prefix` is the path before the braces that enclose them.
fn scan(stream: TokenStream, prefix: &[String], findings: &mut Vec<String>) {
    let tokens: Vec<TokenTree> = stream.into_iter().collect();
    let is = |index: usize, c: char| tokens.get(index).and_then(punct) == Some(c);
    let mut index = 0;
    while index < tokens.len() {
        if is_test_attribute(&tokens, index) {
            index = item_end(&tokens, index);
            continue;
        }
        match &tokens[index] {
            TokenTree::Group(group) => scan(group.stream(), &[], findings),
            TokenTree::Ident(first) => {
                let mut path = prefix.to_vec();
                path.push(first.to_string());
                let mut braces = None;
                while is(index + 1, ':') && is(index + 2, ':') {
                    match tokens.get(index + 3) {
                        Some(TokenTree::Ident(next)) => path.push(next.to_string()),
                        Some(TokenTree::Group(group)) => braces = Some(group.stream()),
                        Some(star) if punct(star) == Some('*') => path.push("*".to_owned()),
                        _ => break,
                    }
                    index += 3;
                }
                let next = tokens.get(index + 1);
                let renamed = next.and_then(ident).as_deref() == Some("as");
                let called = next.and_then(punct) == Some('!');
                match braces {
                    Some(inner) => scan(inner, &path, findings),
                    None => findings.extend(judge(&path, renamed, called)),
                }
                if renamed && !(is(index + 3, ':') && is(index + 4, ':')) {
                    index += 2;
                }
            }
            TokenTree::Punct(_) | TokenTree::Literal(_) => {}
        }
        index += 1;
    }
}

/// Returns the reason why a path is forbidden, if it is.
fn judge(path: &[String], renamed: bool, called: bool) -> Option<String> {
    let path: Vec<&str> = path.iter().map(String::as_str).collect();
    let whole = path.join("::");
    let finding = Some(format!("`{whole}`"));
    let part_of = |module: &str, item: Option<&&str>| {
        let (_, items) = PARTS.iter().find(|(name, _)| *name == module)?;
        Some(item.is_none_or(|item| items.contains(item)))
    };
    match path[..] {
        [keyword] if KEYWORDS.contains(&keyword) => finding,
        [name] if called && MACROS.contains(&name) => finding,
        ["std" | "core" | "alloc"] if renamed => finding,
        ["std" | "core" | "alloc", module, ref rest @ ..] => {
            let allowed = match part_of(module, rest.first()) {
                Some(allowed) => allowed && !renamed,
                None => MODULES.contains(&module),
            };
            if allowed { None } else { finding }
        }
        [root, _, ..] if CRATES.contains(&root) => finding,
        // After `use std::io` and the like.
        [module, item, ..] if part_of(module, Some(&item)) == Some(false) => finding,
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(source: &str) -> Vec<String> {
        findings(source).expect("Rust")
    }

    #[test]
    fn each_rule_can_be_broken() {
        for (source, expected) in [
            ("use std::net::TcpStream;", "`std::net::TcpStream`"),
            ("use std::{fmt, net::UdpSocket};", "`std::net::UdpSocket`"),
            (
                "use std::{fmt, os::unix::net::{self}};",
                "`std::os::unix::net::self`",
            ),
            (
                "fn f() { let _ = std::fs::read(\"x\"); }",
                "`std::fs::read`",
            ),
            (
                "fn f() { ::std::fs::remove_file(p) }",
                "`std::fs::remove_file`",
            ),
            ("use std::path::Path;", "`std::path::Path`"),
            (
                "fn f() { std::thread::spawn(|| ()); }",
                "`std::thread::spawn`",
            ),
            ("use std::time::Instant;", "`std::time::Instant`"),
            (
                "use std::time; fn f() -> time::SystemTime { g() }",
                "`time::SystemTime`",
            ),
            (
                "use std::time::{Duration, SystemTime};",
                "`std::time::SystemTime`",
            ),
            ("use std::time::*;", "`std::time::*`"),
            ("use std::time as t;", "`std::time`"),
            ("use std::process::Command;", "`std::process::Command`"),
            ("fn f() { std::env::var(\"HOME\") }", "`std::env::var`"),
            ("use std::sync::Mutex;", "`std::sync::Mutex`"),
            (
                "use std::sync::atomic::AtomicU64;",
                "`std::sync::atomic::AtomicU64`",
            ),
            ("use std::io; fn f() { io::stdin(); }", "`io::stdin`"),
            ("use std::io::stdout;", "`std::io::stdout`"),
            ("use std as s;", "`std`"),
            ("use std::*;", "`std::*`"),
            ("use std::{self as s};", "`std::self`"),
            ("use core::future::Future;", "`core::future::Future`"),
            ("use tokio::net::TcpStream;", "`tokio::net::TcpStream`"),
            ("fn f() { libc::getpid() }", "`libc::getpid`"),
            ("async fn f() {}", "`async`"),
            ("fn f() { x().await }", "`await`"),
            ("extern crate alloc;", "`extern`"),
            ("fn f() { println!(\"x\"); }", "`println`"),
            ("fn f() { m!(std::fs::read(p)); }", "`std::fs::read`"),
            ("thread_local! { static X: u8 = 1; }", "`thread_local`"),
            (
                "fn f() { #[cfg(test)] mod t {} std::fs::read(p) }",
                "`std::fs::read`",
            ),
        ] {
            assert_eq!(found(source), [expected], "{source}");
        }
    }

    #[test]
    fn what_is_harmless_passes() {
        for source in [
            "use std::{fmt, collections::BTreeMap, io::{self, Read}, time::Duration};",
            "//! std::fs is not used here\n/* std::net */ fn f() { g(\"std::env\") }",
            "fn f(x: u32) -> u64 { let time = x as u64; time }",
            "#[cfg(test)] mod tests { use std::fs; async fn f() {} }",
            "#[cfg(test)] #[allow(x)] mod tests { use std::fs; }",
            "fn f<'a>(core: &'a str) -> io::Result<()> { std::mem::take(core); Ok(()) }",
        ] {
            assert_eq!(found(source), [""; 0], "{source}");
        }
    }

    #[test]
    fn modules_of_tests_are_known() {
        let source = "mod a; #[cfg(test)] mod b; #[cfg(test)] mod c { } #[cfg(test)] pub mod d;";
        assert_eq!(test_modules(source), ["b", "d"]);
    }
}
