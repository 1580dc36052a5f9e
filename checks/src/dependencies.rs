//! Judges the graph of packages that `cargo metadata` prints.

use crate::policy;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

/// A package of the graph.
#[derive(Debug, Clone)]
pub struct Package {
    /// Its name.
    pub name: String,
    /// Its version.
    pub version: String,
    /// Its licence, an SPDX expression.
    pub licence: Option<String>,
    /// The source of the package; `None` for a folder.
    pub source: Option<String>,
    /// Whether the package is compiled into the compiler rather than into its dependents.
    pub is_macro: bool,
    /// Ids of its dependencies, without those of tests and build scripts.
    pub dependencies: Vec<String>,
}

/// The dependency graph: all packages, by id.
#[derive(Debug, Clone)]
pub struct Graph(BTreeMap<String, Package>);

fn text(value: &Value, key: &str) -> Option<String> {
    value[key].as_str().map(str::to_owned)
}

fn list<'a>(value: &'a Value, key: &str) -> impl Iterator<Item = &'a Value> {
    value[key].as_array().into_iter().flatten()
}

impl Graph {
    /// Parses the output of `cargo metadata --format-version 1`.
    pub fn new(json: &str) -> Result<Self, String> {
        let json: Value = serde_json::from_str(json).map_err(|error| error.to_string())?;
        let mut dependencies = BTreeMap::new();
        for node in list(&json["resolve"], "nodes") {
            let normal = list(node, "deps").filter(|dependency| {
                list(dependency, "dep_kinds").any(|kind| kind["kind"].is_null())
            });
            let ids: Vec<String> = normal.filter_map(|dep| text(dep, "pkg")).collect();
            dependencies.insert(text(node, "id"), ids);
        }
        let mut packages = BTreeMap::new();
        for package in list(&json, "packages") {
            let id = text(package, "id");
            let kinds = list(package, "targets").flat_map(|target| list(target, "kind"));
            packages.insert(
                id.clone().ok_or("a package without id")?,
                Package {
                    name: text(package, "name").ok_or("a package without name")?,
                    version: text(package, "version").ok_or("a package without version")?,
                    licence: text(package, "license"),
                    source: text(package, "source"),
                    is_macro: kinds.into_iter().any(|kind| kind == "proc-macro"),
                    dependencies: dependencies.remove(&id).unwrap_or_default(),
                },
            );
        }
        if packages.is_empty() {
            return Err("no packages".to_owned());
        }
        Ok(Self(packages))
    }

    fn members(&self) -> impl Iterator<Item = &Package> {
        self.0.values().filter(|package| package.source.is_none())
    }

    fn direct<'a>(&'a self, package: &'a Package) -> impl Iterator<Item = &'a Package> {
        package.dependencies.iter().filter_map(|id| self.0.get(id))
    }

    /// Returns the names of all packages compiled into a package.
    fn closure(&self, package: &Package) -> BTreeSet<String> {
        let mut names = BTreeSet::new();
        let mut todo = vec![package];
        while let Some(package) = todo.pop() {
            for dependency in self
                .direct(package)
                .filter(|dependency| !dependency.is_macro)
            {
                if names.insert(dependency.name.clone()) {
                    todo.push(dependency);
                }
            }
        }
        names
    }

    /// Returns the packages that are compiled into a core and are not allowed there.
    pub fn core_findings(&self) -> Vec<String> {
        let allowed = |name: &str| {
            policy::CORES.contains(&name)
                || policy::CORE_DEPENDENCIES
                    .iter()
                    .any(|(allowed, _)| *allowed == name)
        };
        let mut findings = Vec::new();
        for core in policy::CORES {
            let Some(package) = self.members().find(|package| package.name == core) else {
                findings.push(format!("there is no package {core}"));
                continue;
            };
            let strangers = self
                .closure(package)
                .into_iter()
                .filter(|name| !allowed(name));
            findings.extend(strangers.map(|name| format!("{core} contains {name}")));
        }
        findings
    }

    /// Returns dependencies between members that point the wrong way.
    pub fn direction_findings(&self) -> Vec<String> {
        let members: BTreeSet<&str> = self.members().map(|package| &package.name[..]).collect();
        let mut findings = Vec::new();
        for package in self.members() {
            let Some((_, allowed)) = policy::DIRECTION
                .iter()
                .find(|(name, _)| *name == package.name)
            else {
                findings.push(format!("{}: say what it may depend on", package.name));
                continue;
            };
            let inner = self.direct(package).map(|dependency| &dependency.name[..]);
            for name in inner.filter(|name| members.contains(name) && !allowed.contains(name)) {
                findings.push(format!("{} must not depend on {name}", package.name));
            }
        }
        findings
    }

    /// Returns packages whose licence is missing or not on the list.
    pub fn licence_findings(&self) -> Vec<String> {
        let bad = self.0.values().filter(|package| {
            package
                .licence
                .as_deref()
                .is_none_or(|expression| !licence_fits(expression))
        });
        bad.map(|package| {
            let licence = package.licence.as_deref().unwrap_or("none");
            format!("{} {}: licence {licence}", package.name, package.version)
        })
        .collect()
    }

    /// Returns packages from sources other than the registry and this repository.
    pub fn source_findings(&self) -> Vec<String> {
        let mut findings = Vec::new();
        for package in self.0.values() {
            match &package.source {
                Some(source) if source != policy::REGISTRY => {
                    findings.push(format!("{} comes from {source}", package.name));
                }
                None if !package.name.starts_with("longhaul-") => {
                    findings.push(format!("{} comes from a folder", package.name));
                }
                _ => {}
            }
        }
        findings
    }

    /// Returns packages present in several versions without a reason, and reasons that are not
    /// needed.
    pub fn duplicate_findings(&self) -> Vec<String> {
        let mut versions: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for package in self.0.values() {
            versions
                .entry(&package.name)
                .or_default()
                .push(&package.version);
        }
        versions.retain(|_, versions| versions.len() > 1);
        let reason = |name: &str| policy::DUPLICATES.iter().any(|(known, _)| *known == name);
        let mut findings: Vec<String> = versions
            .iter()
            .filter(|(name, _)| !reason(name))
            .map(|(name, versions)| format!("{name} is built as {}", versions.join(" and ")))
            .collect();
        for (name, _) in policy::DUPLICATES {
            if !versions.contains_key(name) {
                findings.push(format!("{name} is built once: take it off the list"));
            }
        }
        findings
    }
}

/// Returns whether an SPDX expression allows a licence on the list.
pub fn licence_fits(expression: &str) -> bool {
    let spaced = expression
        .replace('(', " ( ")
        .replace(')', " ) ")
        .replace('/', " OR ");
    let mut words = spaced.split_whitespace().peekable();
    let fits = any_of(&mut words);
    fits && words.next().is_none()
}

type Words<'a, 'b> = &'b mut std::iter::Peekable<std::str::SplitWhitespace<'a>>;

fn any_of(words: Words<'_, '_>) -> bool {
    let mut fits = all_of(words);
    while words.next_if_eq(&"OR").is_some() {
        fits |= all_of(words);
    }
    fits
}

fn all_of(words: Words<'_, '_>) -> bool {
    let mut fits = one(words);
    while words.next_if_eq(&"AND").is_some() {
        fits &= one(words);
    }
    fits
}

fn one(words: Words<'_, '_>) -> bool {
    let Some(word) = words.next() else {
        return false;
    };
    if word == "(" {
        let fits = any_of(words);
        return words.next() == Some(")") && fits;
    }
    match words.next_if_eq(&"WITH").and_then(|_| words.next()) {
        Some(exception) => policy::LICENCES.contains(&&format!("{word} WITH {exception}")[..]),
        None => policy::LICENCES.contains(&word),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIT: &str = "git+https://example.org/x";

    fn package(name: &str, dependencies: &[&str]) -> Package {
        let ours = name.starts_with("longhaul-");
        Package {
            name: name.to_owned(),
            version: "1.0.0".to_owned(),
            licence: Some("MIT".to_owned()),
            source: (!ours).then(|| policy::REGISTRY.to_owned()),
            is_macro: name.ends_with("_derive"),
            dependencies: dependencies.iter().map(|name| (*name).to_owned()).collect(),
        }
    }

    fn graph(packages: Vec<Package>) -> Graph {
        Graph(
            packages
                .into_iter()
                .map(|package| (package.name.clone(), package))
                .collect(),
        )
    }

    fn cores() -> Vec<Package> {
        policy::CORES.map(|core| package(core, &[])).to_vec()
    }

    #[test]
    fn a_core_with_a_runtime_is_found_however_deep_it_sits() {
        let mut packages = cores();
        assert_eq!(graph(packages.clone()).core_findings(), [""; 0]);
        packages.push(package("longhaul-codec", &["zstd", "x_derive"]));
        packages.push(package("zstd", &["mio"]));
        packages.push(package("mio", &[]));
        packages.push(package("x_derive", &["libudev"]));
        packages.push(package("libudev", &[]));
        assert_eq!(
            graph(packages.clone()).core_findings(),
            ["longhaul-codec contains mio"]
        );
        packages.retain(|package| package.name != "longhaul-engine");
        let findings = graph(packages).core_findings();
        assert!(findings.contains(&"there is no package longhaul-engine".to_owned()));
    }

    #[test]
    fn an_arrow_that_points_back_is_found() {
        let mut packages = cores();
        packages.push(package("longhaul-storage", &["longhaul-engine"]));
        assert_eq!(graph(packages.clone()).direction_findings(), [""; 0]);
        packages.push(package("longhaul-codec", &["longhaul-engine"]));
        packages.push(package(
            "longhaul-lab",
            &["longhaul-engine", "longhaul-protocol"],
        ));
        packages.push(package("longhaul-new", &[]));
        let expected = [
            "longhaul-codec must not depend on longhaul-engine",
            "longhaul-lab must not depend on longhaul-engine",
            "longhaul-new: say what it may depend on",
        ];
        assert_eq!(graph(packages).direction_findings(), expected);
    }

    #[test]
    fn licences_are_read() {
        for fits in [
            "MIT",
            "Apache-2.0 OR GPL-3.0",
            "MIT/Apache-2.0",
            "(MIT OR Apache-2.0) AND Unicode-3.0",
            "Apache-2.0 WITH LLVM-exception OR MIT",
        ] {
            assert!(licence_fits(fits), "{fits}");
        }
        for unfit in [
            "",
            "GPL-3.0",
            "MIT AND GPL-2.0",
            "(MIT OR Apache-2.0) AND MPL-2.0",
            "MIT WITH Some-exception",
            "(MIT",
            "MIT MIT",
        ] {
            assert!(!licence_fits(unfit), "{unfit}");
        }
        let copyleft = Package {
            licence: Some("AGPL-3.0".to_owned()),
            ..package("a", &[])
        };
        let none = Package {
            licence: None,
            ..package("b", &[])
        };
        let findings = graph(vec![copyleft, none, package("c", &[])]).licence_findings();
        assert_eq!(
            findings,
            ["a 1.0.0: licence AGPL-3.0", "b 1.0.0: licence none"]
        );
    }

    #[test]
    fn packages_from_elsewhere_are_found() {
        let git = Package {
            source: Some(GIT.to_owned()),
            ..package("a", &[])
        };
        let folder = Package {
            source: None,
            ..package("b", &[])
        };
        let findings = graph(vec![git, folder, package("c", &[])]).source_findings();
        assert_eq!(
            findings,
            [
                format!("a comes from {GIT}"),
                "b comes from a folder".to_owned()
            ]
        );
    }

    #[test]
    fn second_versions_are_found_and_stale_reasons_too() {
        let graph = |versions: &[(&str, &str)]| {
            let package = |(name, version): &(&str, &str)| {
                let version = (*version).to_owned();
                (
                    format!("{name} {version}"),
                    Package {
                        version,
                        ..package(name, &[])
                    },
                )
            };
            Graph(versions.iter().map(package).collect())
        };
        let listed = policy::DUPLICATES.map(|(name, _)| [(name, "1.0.0"), (name, "2.0.0")]);
        let mut packages = listed.as_flattened().to_vec();
        assert_eq!(graph(&packages).duplicate_findings(), [""; 0]);
        packages.extend([("a", "1.0.0"), ("a", "2.0.0")]);
        assert_eq!(
            graph(&packages).duplicate_findings(),
            ["a is built as 1.0.0 and 2.0.0"]
        );
        let (once, _) = policy::DUPLICATES[0];
        packages.retain(|(name, version)| *name != once || *version == "1.0.0");
        let stale = format!("{once} is built once: take it off the list");
        assert!(graph(&packages).duplicate_findings().contains(&stale));
    }

    #[test]
    fn metadata_is_read() {
        let json = r#"{
            "packages": [
                {"id": "a", "name": "longhaul-codec", "version": "1.0.0", "license": "MIT",
                 "source": null, "targets": [{"kind": ["lib"]}]},
                {"id": "b", "name": "m", "version": "2.0.0", "license": null,
                 "source": "elsewhere", "targets": [{"kind": ["proc-macro"]}]}],
            "resolve": {"nodes": [{"id": "a", "deps": [
                {"pkg": "b", "dep_kinds": [{"kind": "dev"}, {"kind": null}]},
                {"pkg": "c", "dep_kinds": [{"kind": "dev"}]}]}]}}"#;
        let graph = Graph::new(json).expect("metadata");
        assert_eq!(graph.0["a"].dependencies, ["b"]);
        assert!(graph.0["b"].is_macro && !graph.0["a"].is_macro);
        assert_eq!(graph.source_findings(), ["m comes from elsewhere"]);
        assert!(Graph::new("{}").is_err());
    }
}
