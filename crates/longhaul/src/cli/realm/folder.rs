//! Owns the folder of a realm's operator: key, working copy, and the ruleset that was signed last.

use crate::cli::error::CliError;
use longhaul_protocol::HostId;
use longhaul_realm::enrolment::TokenId;
use longhaul_realm::key::{RealmId, SEED_BYTES, SigningKey};
use longhaul_realm::ruleset::{
    Arbiter, Gateway, GatewayAddress, HostEntry, NetworkEntry, NetworkId, Ruleset, Scope,
    ServerEntry, SignedRuleset, StoreId, Tombstone, VlanPolicy, VlanRange,
};
use longhaul_transport::write_atomic;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::net::IpAddr;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};

const KEY_FILE: &str = "realm.key";
const PLAN_FILE: &str = "realm.toml";
const RULESET_FILE: &str = "ruleset";
/// Longest file that is read, in bytes.
const FILE_BYTES_MAX: u64 = 4 << 20;
const DAY_S: u64 = 86_400;
/// The life of a ruleset.
const LIFETIME_DAYS: u64 = 90;
const HEADER: &str = "\
# The realm as it will be signed next. Written by `longhaul realm`, `longhaul network` and
# `longhaul host`; it may be edited by hand. Comments are lost.
\n";

/// The operator's folder.
#[derive(Debug)]
pub(crate) struct Folder {
    path: PathBuf,
    /// The realm's key.
    pub(crate) key: SigningKey,
    /// The working copy.
    pub(crate) plan: Plan,
    /// The ruleset that was signed last.
    pub(crate) signed: Option<SignedRuleset>,
}

/// The working copy of a ruleset.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Plan {
    /// The name of the realm, for people.
    pub(crate) name: String,
    /// How long a signed version counts.
    pub(crate) lifetime_days: u64,
    /// Tokens that enrol nobody any more, by id.
    #[serde(default)]
    pub(crate) revoked: Vec<String>,
    /// The arbiter, if the realm has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) arbiter: Option<PlannedArbiter>,
    /// The rendezvous servers, by fingerprint.
    #[serde(default)]
    pub(crate) server: BTreeMap<String, PlannedServer>,
    /// The hosts, by name.
    #[serde(default)]
    pub(crate) host: BTreeMap<String, PlannedHost>,
    /// The networks, by name.
    #[serde(default)]
    pub(crate) network: BTreeMap<String, PlannedNetwork>,
    /// Removed hosts: when, in seconds since 1970, by fingerprint.
    #[serde(default)]
    pub(crate) removed: BTreeMap<String, u64>,
    /// Tokens that were given out, by id.
    #[serde(default)]
    pub(crate) token: BTreeMap<String, PlannedToken>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct PlannedServer {
    pub(crate) addresses: Vec<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct PlannedArbiter {
    /// The fingerprint of a rendezvous server.
    pub(crate) server: String,
    /// The id of its store, as it shows it at its start.
    pub(crate) store: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct PlannedHost {
    pub(crate) fingerprint: String,
    pub(crate) site: String,
    #[serde(default)]
    pub(crate) may_query: bool,
    #[serde(default)]
    pub(crate) may_send_guests: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) token: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct PlannedNetwork {
    pub(crate) id: String,
    pub(crate) mtu: u16,
    /// `none`, `any`, or ranges.
    pub(crate) vlans: String,
    /// Hosts by name.
    #[serde(default)]
    pub(crate) members: Vec<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) gateway: Option<PlannedGateway>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct PlannedGateway {
    /// `ADDRESS/BITS`.
    pub(crate) addresses: Vec<String>,
    /// 12 hexadecimal digits.
    pub(crate) mac: String,
    /// The sites that have it; none if all have.
    #[serde(default)]
    pub(crate) sites: Vec<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct PlannedToken {
    /// The name of the host that joins.
    pub(crate) host: String,
    pub(crate) expires_s: u64,
}

impl Folder {
    /// Makes a realm in an empty or new folder.
    pub(crate) fn create(path: &Path, name: &str) -> Result<Self, CliError> {
        let key_file = path.join(KEY_FILE);
        if key_file.exists() {
            return Err(CliError::usage(
                format!("{} has a realm already", path.display()),
                "name another folder: --folder FOLDER",
            ));
        }
        let mut builder = std::fs::DirBuilder::new();
        builder
            .recursive(true)
            .mode(0o700)
            .create(path)
            .map_err(|error| cannot(path, &error))?;
        let mut seed = [0; SEED_BYTES];
        getrandom::fill(&mut seed)
            .map_err(|error| CliError::failed("realm", format!("no random numbers: {error}")))?;
        let text = format!("{}\n", hex(&seed));
        write_atomic(&key_file, text.as_bytes()).map_err(|error| cannot(&key_file, &error))?;
        let folder = Self {
            path: path.to_owned(),
            key: key_of(&seed)?,
            plan: Plan {
                name: name.to_owned(),
                lifetime_days: LIFETIME_DAYS,
                revoked: Vec::new(),
                arbiter: None,
                server: BTreeMap::new(),
                host: BTreeMap::new(),
                network: BTreeMap::new(),
                removed: BTreeMap::new(),
                token: BTreeMap::new(),
            },
            signed: None,
        };
        folder.save()?;
        Ok(folder)
    }

    /// Opens a realm's folder.
    pub(crate) fn open(path: &Path) -> Result<Self, CliError> {
        let key_file = path.join(KEY_FILE);
        let found = std::fs::metadata(&key_file).map_err(|error| match error.kind() {
            std::io::ErrorKind::NotFound => CliError::usage(
                format!("{} has no realm", path.display()),
                "`longhaul realm create NAME` makes one; --folder names another folder",
            ),
            _ => cannot(&key_file, &error),
        })?;
        if found.permissions().mode() & 0o077 != 0 {
            return Err(CliError::usage(
                format!("{} can be read by other users", key_file.display()),
                format!("chmod 600 {}", key_file.display()),
            ));
        }
        let text = read(&key_file)?;
        let seed = bytes_of(text.trim()).ok_or_else(|| {
            cannot(
                &key_file,
                &"it is no key: 64 hexadecimal digits are expected",
            )
        })?;
        let plan_file = path.join(PLAN_FILE);
        let plan =
            toml::from_str(&read(&plan_file)?).map_err(|error| cannot(&plan_file, &error))?;
        let signed_file = path.join(RULESET_FILE);
        let signed = match std::fs::metadata(&signed_file) {
            Ok(found) if found.len() > FILE_BYTES_MAX => {
                return Err(cannot(&signed_file, &"it is too large"));
            }
            Ok(_) => {
                let bytes = std::fs::read(&signed_file);
                let bytes = bytes.map_err(|error| cannot(&signed_file, &error))?;
                let signed = postcard::from_bytes(&bytes);
                Some(signed.map_err(|error| cannot(&signed_file, &error))?)
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
            Err(error) => return Err(cannot(&signed_file, &error)),
        };
        Ok(Self {
            path: path.to_owned(),
            key: key_of(&seed)?,
            plan,
            signed,
        })
    }

    /// Writes the working copy.
    pub(crate) fn save(&self) -> Result<(), CliError> {
        let path = self.path.join(PLAN_FILE);
        let text = toml::to_string(&self.plan).map_err(|error| cannot(&path, &error))?;
        let text = format!("{HEADER}{text}");
        write_atomic(&path, text.as_bytes()).map_err(|error| cannot(&path, &error))
    }

    /// Keeps a signed ruleset.
    pub(crate) fn keep(&mut self, signed: SignedRuleset) -> Result<(), CliError> {
        let path = self.path.join(RULESET_FILE);
        let bytes = postcard::to_stdvec(&signed).map_err(|error| cannot(&path, &error))?;
        write_atomic(&path, &bytes).map_err(|error| cannot(&path, &error))?;
        self.signed = Some(signed);
        Ok(())
    }

    /// Returns the folder itself.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the id of the realm.
    pub(crate) fn realm(&self) -> RealmId {
        self.key.public().realm()
    }

    /// Returns the content of the ruleset that was signed last.
    pub(crate) fn last(&self) -> Result<Option<Ruleset>, CliError> {
        let verify = |signed: &SignedRuleset| signed.verify(self.realm());
        let verified = self.signed.as_ref().map(verify).transpose();
        let path = self.path.join(RULESET_FILE);
        let verified = verified.map_err(|error| cannot(&path, &error))?;
        Ok(verified.map(|verified| verified.content().clone()))
    }

    /// Returns the ruleset of the working copy, as the version after `last`.
    pub(crate) fn next(&self, last: Option<&Ruleset>, unix_s: u64) -> Result<Ruleset, CliError> {
        let plan = &self.plan;
        let bad = |text: String| {
            let file = self.path.join(PLAN_FILE);
            CliError::usage(text, format!("correct {}", file.display()))
        };
        let hosts = plan.host.iter().map(|(name, host)| host.entry(name));
        let hosts: Vec<HostEntry> = hosts.collect::<Result<_, _>>().map_err(bad)?;
        let networks = plan
            .network
            .iter()
            .map(|(name, network)| network.entry(name, &hosts));
        let networks: Vec<NetworkEntry> = networks.collect::<Result<_, _>>().map_err(bad)?;
        let removed = plan.removed.iter().map(|(id, removed_s)| {
            let id = fingerprint(id)?;
            Ok(Tombstone {
                id,
                removed_s: *removed_s,
            })
        });
        let revoked = plan.revoked.iter().map(|text| id_of(text).map(TokenId));
        let arbiter = plan.arbiter.as_ref().map(|arbiter| {
            let server = fingerprint(&arbiter.server)?;
            let store = id_of(&arbiter.store).map(StoreId)?;
            Ok(Arbiter { server, store })
        });
        Ok(Ruleset {
            realm: self.realm(),
            version: last.map_or(0, |last| last.version) + 1,
            issued_s: unix_s,
            expires_s: unix_s + plan.lifetime_days.saturating_mul(DAY_S),
            removed: removed.collect::<Result<_, String>>().map_err(bad)?,
            revoked: revoked.collect::<Result<_, String>>().map_err(bad)?,
            servers: self.servers()?,
            arbiter: arbiter.transpose().map_err(bad)?,
            hosts,
            networks,
        })
    }

    /// Returns the rendezvous servers of the working copy.
    pub(crate) fn servers(&self) -> Result<Vec<ServerEntry>, CliError> {
        let entry = |(id, server): (&String, &PlannedServer)| {
            let addresses = server.addresses.clone();
            fingerprint(id).map(|id| ServerEntry { id, addresses })
        };
        let servers = self.plan.server.iter().map(entry).collect::<Result<_, _>>();
        servers.map_err(|text| CliError::usage(text, "correct realm.toml"))
    }
}

impl PlannedHost {
    fn entry(&self, name: &str) -> Result<HostEntry, String> {
        Ok(HostEntry {
            id: fingerprint(&self.fingerprint)?,
            name: name.to_owned(),
            site: self.site.clone(),
            scope: Scope {
                may_query: self.may_query,
                may_send_guests: self.may_send_guests,
            },
            token: self.token.as_deref().map(id_of).transpose()?.map(TokenId),
        })
    }
}

impl PlannedNetwork {
    fn entry(&self, name: &str, hosts: &[HostEntry]) -> Result<NetworkEntry, String> {
        let member = |wanted: &String| {
            let host = hosts.iter().find(|host| host.name == *wanted);
            host.map(|host| host.id)
                .ok_or_else(|| format!("network `{name}` has the member `{wanted}`: no such host"))
        };
        Ok(NetworkEntry {
            id: id_of(&self.id).map(NetworkId)?,
            name: name.to_owned(),
            members: self.members.iter().map(member).collect::<Result<_, _>>()?,
            vlans: vlans(&self.vlans)?,
            mtu: self.mtu,
            gateway: self
                .gateway
                .as_ref()
                .map(|gateway| gateway.entry(name))
                .transpose()?,
        })
    }
}

impl PlannedGateway {
    fn entry(&self, network: &str) -> Result<Gateway, String> {
        let mac = id_of(&self.mac);
        let mac = mac.map_err(|error| format!("the MAC of the gateway of `{network}`: {error}"))?;
        let addresses = self.addresses.iter().map(|text| gateway_address(text));
        Ok(Gateway {
            addresses: addresses.collect::<Result<_, _>>()?,
            mac,
            sites: self.sites.clone(),
        })
    }
}

/// Parses `ADDRESS/BITS`. Hosts know IPv4 gateways only.
pub(crate) fn gateway_address(text: &str) -> Result<GatewayAddress, String> {
    let address: GatewayAddress = text.parse()?;
    match address.ip {
        IpAddr::V4(_) => Ok(address),
        IpAddr::V6(_) => Err(format!(
            "`{address}` is an IPv6 address: gateways have IPv4 addresses only"
        )),
    }
}

/// Parses `none`, `any`, or ranges such as `10-19,30`.
pub(crate) fn vlans(text: &str) -> Result<VlanPolicy, String> {
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let number = |text: &str| text.trim().parse::<u16>();
        match (number(first), number(last)) {
            (Ok(first), Ok(last)) => Ok(VlanRange { first, last }),
            _ => Err(format!(
                "`{}` are no VLANs: `none`, `any`, or ranges such as 10-19,30",
                text.escape_debug()
            )),
        }
    };
    match text {
        "none" => Ok(VlanPolicy::Untagged),
        "any" => Ok(VlanPolicy::Any),
        ranges => ranges
            .split(',')
            .map(range)
            .collect::<Result<_, _>>()
            .map(VlanPolicy::Only),
    }
}

fn fingerprint(text: &str) -> Result<HostId, String> {
    text.parse()
        .map_err(|error| format!("`{}`: {error}", text.escape_debug()))
}

fn id_of<const N: usize>(text: &str) -> Result<[u8; N], String> {
    bytes_of(text).ok_or_else(|| {
        format!(
            "`{}` is not an id of {} hexadecimal digits",
            text.escape_debug(),
            2 * N
        )
    })
}

fn bytes_of<const N: usize>(text: &str) -> Option<[u8; N]> {
    let mut bytes = [0; N];
    if text.len() != 2 * N || !text.is_ascii() {
        return None;
    }
    for (at, byte) in bytes.iter_mut().enumerate() {
        let digits = text.get(2 * at..2 * at + 2)?;
        if !digits.bytes().all(|digit| digit.is_ascii_hexdigit()) {
            return None;
        }
        *byte = u8::from_str_radix(digits, 16).ok()?;
    }
    Some(bytes)
}

/// Returns the hexadecimal digits of bytes.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        // Writing to a text does not fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

fn key_of(seed: &[u8; SEED_BYTES]) -> Result<SigningKey, CliError> {
    SigningKey::from_seed(seed)
        .ok_or_else(|| CliError::failed("realm", "the key cannot be used".to_owned()))
}

fn read(path: &Path) -> Result<String, CliError> {
    let found = std::fs::metadata(path).map_err(|error| cannot(path, &error))?;
    if found.len() > FILE_BYTES_MAX {
        return Err(cannot(path, &"it is too large"));
    }
    std::fs::read_to_string(path).map_err(|error| cannot(path, &error))
}

fn cannot(path: &Path, error: &dyn std::fmt::Display) -> CliError {
    CliError::failed("realm", format!("{}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_realm_survives_its_folder_and_keeps_its_key_private() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("realm");
        let created = Folder::create(&path, "acme").unwrap();
        let opened = Folder::open(&path).unwrap();
        assert_eq!(
            (opened.realm(), &opened.plan),
            (created.realm(), &created.plan)
        );
        assert!(Folder::create(&path, "other").is_err());
        let key = path.join(KEY_FILE);
        std::fs::set_permissions(&key, std::fs::Permissions::from_mode(0o644)).unwrap();
        assert!(Folder::open(&path).is_err());
    }

    #[test]
    fn vlans_are_read() {
        assert_eq!(vlans("none"), Ok(VlanPolicy::Untagged));
        assert_eq!(vlans("any"), Ok(VlanPolicy::Any));
        let ranges = vec![
            VlanRange {
                first: 10,
                last: 19,
            },
            VlanRange {
                first: 30,
                last: 30,
            },
        ];
        assert_eq!(vlans("10-19,30"), Ok(VlanPolicy::Only(ranges)));
        for bad in ["", "x", "1-", "70000"] {
            assert!(vlans(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_plan_becomes_a_ruleset_or_says_what_is_wrong() {
        let folder = tempfile::tempdir().unwrap();
        let mut folder = Folder::create(&folder.path().join("realm"), "acme").unwrap();
        let host = PlannedHost {
            fingerprint: HostId([1; 32]).to_string(),
            site: "fr".to_owned(),
            may_query: true,
            may_send_guests: false,
            token: Some("00".repeat(16)),
        };
        folder.plan.host.insert("paris".to_owned(), host);
        let network = PlannedNetwork {
            id: "01".repeat(8),
            mtu: 1500,
            vlans: "none".to_owned(),
            members: vec!["paris".to_owned()],
            gateway: Some(PlannedGateway {
                addresses: vec!["10.0.0.1/24".to_owned()],
                mac: "026c68000001".to_owned(),
                sites: vec!["fr".to_owned()],
            }),
        };
        folder.plan.network.insert("blue".to_owned(), network);
        let ruleset = folder.next(None, 1_800_000_000).unwrap();
        assert_eq!((ruleset.version, ruleset.networks[0].members.len()), (1, 1));
        let gateway = ruleset.networks[0].gateway.as_ref().unwrap();
        assert_eq!(gateway.mac, [2, 0x6c, 0x68, 0, 0, 1]);
        assert_eq!(gateway.addresses[0].to_string(), "10.0.0.1/24");
        assert!(gateway.is_at("fr") && !gateway.is_at("no"));
        folder.plan.host.clear();
        let error = folder.next(None, 1_800_000_000).unwrap_err();
        assert!(error.lines()[0].render(200, false).contains("no such host"));
    }
}
