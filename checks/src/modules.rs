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
    fn refused_words_are_found_outside_comments() {
        let words = [("guest::find", "a manager"), ("Qmp::connect", "a lease")];
        let text = "/// Not [`Qmp::connect`].\nfn f() {\n    guest::find_all(state);\n}\n";
        assert_eq!(refused(text, &words), [("guest::find", "a manager")]);
        assert!(refused("    // guest::find\nguests.find(name);", &words).is_empty());
    }
}
