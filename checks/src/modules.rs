//! Finds which modules of a package import which others, from their `crate::` paths, and which
//! refused words they use.

use std::collections::BTreeSet;

/// Returns the top-level modules of its package that a source names.
pub fn imports(text: &str) -> BTreeSet<&str> {
    let mut found = BTreeSet::new();
    for (at, prefix) in text.match_indices("crate::") {
        let before = text[..at].chars().next_back();
        if before.is_some_and(|letter| letter.is_alphanumeric() || "_:$".contains(letter)) {
            continue;
        }
        let rest = &text[at + prefix.len()..];
        let ends = |letter: char| !letter.is_alphanumeric() && letter != '_';
        match rest.strip_prefix('{') {
            // Not used in this repository, and not parsed: a group would hide its modules.
            Some(_) => found.extend(["{"]),
            None => found.extend(rest.split(ends).next()),
        }
    }
    found
}

/// Returns the top-level module that a file belongs to, by its path below `src`.
pub fn module(path: &str) -> &str {
    let end = path.find(['/', '.']).unwrap_or(path.len());
    &path[..end]
}

/// Returns imports of a module that are not allowed.
pub fn findings(path: &str, text: &str, may: &[&str]) -> Vec<String> {
    let own = module(path);
    imports(text)
        .into_iter()
        .filter(|name| *name != own && !may.contains(name))
        .map(|name| format!("{path}: imports `crate::{name}`"))
        .collect()
}

/// Returns the rings of imports between the files of a package, given by their paths below `src`.
/// Files that implement one type import each other: rings of a file and files of its folder do not
/// count. Test code and comments do not count either.
pub fn rings(files: &[(&str, &str)]) -> Vec<Vec<String>> {
    let names: Vec<String> = files.iter().map(|(path, _)| name_of(path)).collect();
    let imported: Vec<BTreeSet<usize>> = files
        .iter()
        .map(|(_, text)| {
            paths(text)
                .filter_map(|path| resolve(&path, &names))
                .collect()
        })
        .collect();
    let reach: Vec<BTreeSet<usize>> = (0..files.len())
        .map(|from| {
            let (mut reached, mut next) = (BTreeSet::new(), vec![from]);
            while let Some(at) = next.pop() {
                next.extend(imported[at].iter().filter(|to| reached.insert(**to)));
            }
            reached
        })
        .collect();
    let mut rings = BTreeSet::new();
    for from in 0..files.len() {
        let back =
            |to: &usize| *to != from && reach[from].contains(to) && reach[*to].contains(&from);
        let mut ring: Vec<String> = (0..files.len())
            .filter(|to| *to == from || back(to))
            .map(|at| names[at].clone())
            .collect();
        ring.sort();
        let of_one_type = ring.iter().any(|head| {
            let inside = format!("{head}::");
            ring.iter()
                .all(|name| name == head || name.starts_with(&inside))
        });
        if ring.len() > 1 && !of_one_type {
            rings.insert(ring);
        }
    }
    rings.into_iter().collect()
}

/// Returns the module of a file.
fn name_of(path: &str) -> String {
    let path = path.strip_suffix(".rs").unwrap_or(path);
    let path = path.strip_suffix("/mod").unwrap_or(path);
    path.replace('/', "::")
}

/// Returns the module that a path below `crate::` leads to: the longest that is a file.
fn resolve(path: &str, names: &[String]) -> Option<usize> {
    let mut path = path;
    loop {
        if let Some(at) = names.iter().position(|name| name == path) {
            return Some(at);
        }
        path = path.rsplit_once("::")?.0;
    }
}

/// Returns the paths below `crate::` that a source names, with groups written out.
fn paths(text: &str) -> impl Iterator<Item = String> + use<> {
    let code = text.split("#[cfg(test)]").next().unwrap_or_default();
    let is_code = |line: &&str| !line.trim_start().starts_with("//");
    let code: String = code.lines().filter(is_code).collect::<Vec<_>>().join(" ");
    let mut found = Vec::new();
    for (at, prefix) in code.match_indices("crate::") {
        let before = code[..at].chars().next_back();
        if !before.is_some_and(|letter| letter.is_alphanumeric() || "_:$".contains(letter)) {
            path(&code[at + prefix.len()..], "", &mut found);
        }
    }
    found.into_iter()
}

/// Reads a path, which may end in a group. Returns what follows it.
fn path<'a>(text: &'a str, above: &str, found: &mut Vec<String>) -> &'a str {
    let is_path = |letter: char| letter.is_alphanumeric() || letter == '_' || letter == ':';
    let text = text.trim_start();
    let end = text.find(|letter| !is_path(letter)).unwrap_or(text.len());
    let whole = format!("{above}{}", &text[..end]);
    let Some(mut rest) = text[end..].strip_prefix('{') else {
        found.push(whole);
        return &text[end..];
    };
    loop {
        rest = path(rest, &whole, found).trim_start();
        match rest.strip_prefix(',') {
            Some(more) if !more.trim_start().starts_with('}') => rest = more,
            Some(more) => return more.trim_start().strip_prefix('}').unwrap_or(more),
            None => return rest.strip_prefix('}').unwrap_or(rest),
        }
    }
}

/// Returns the words of a list that a source uses outside its comments, with their replacements.
pub fn refused<'a>(text: &str, words: &[(&'a str, &'a str)]) -> Vec<(&'a str, &'a str)> {
    let is_code = |line: &&str| !line.trim_start().starts_with("//");
    let used = |word: &str| text.lines().filter(is_code).any(|line| line.contains(word));
    words
        .iter()
        .copied()
        .filter(|(word, _)| used(word))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_imported_is_found() {
        let text = "use crate::host::config;\nfn f() { crate::disks::g(pub(crate)); }\n\
                    /// [`crate::files::open`]\nuse other_crate::source::x;\nuse crate::context;";
        let found: Vec<&str> = imports(text).into_iter().collect();
        assert_eq!(found, ["context", "disks", "files", "host"]);
        assert_eq!(imports("use crate::{a, b};").len(), 1);
        assert_eq!(module("source/attempt/drain.rs"), "source");
        assert_eq!(module("context.rs"), "context");
    }

    #[test]
    fn what_must_not_be_imported_is_named() {
        let text = "use crate::source::plan;\nuse crate::host::lock::lock;\nuse crate::verify::x;";
        assert_eq!(
            findings("destination/qemu.rs", text, &["host", "verify"]),
            ["destination/qemu.rs: imports `crate::source`"]
        );
        assert!(findings("source/plan.rs", text, &["host", "verify"]).is_empty());
        assert_eq!(findings("host/a.rs", "use crate::{x};", &[]).len(), 1);
    }

    #[test]
    fn rings_of_imports_are_found() {
        let ring = [
            ("a.rs", "use crate::b::{c::{self, D}, E,};"),
            ("b/mod.rs", "/// [`crate::a`]\n"),
            ("b/c.rs", "fn f(x: crate::d::X) {}"),
            ("d.rs", "use crate::a::Y;\n#[cfg(test)]\nuse crate::e::T;"),
            ("e.rs", "use crate::d::X;"),
        ];
        assert_eq!(rings(&ring), [["a", "b::c", "d"]]);
        let of_one_type = [
            ("a.rs", "use crate::a::b::f;"),
            ("a/b.rs", "use crate::a::A;"),
            ("c.rs", "use crate::a::A;"),
        ];
        assert!(rings(&of_one_type).is_empty());
    }

    #[test]
    fn refused_words_are_found_outside_comments() {
        let words = [("guest::find", "a manager"), ("Qmp::connect", "a lease")];
        let text = "/// Not [`Qmp::connect`].\nfn f() {\n    guest::find_all(state);\n}\n";
        assert_eq!(refused(text, &words), [("guest::find", "a manager")]);
        assert!(refused("    // guest::find\nguests.find(name);", &words).is_empty());
    }
}
