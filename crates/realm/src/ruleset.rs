//! Owns the ruleset of a realm: who is a member, which networks exist, and who serves the realm.
//!
//! CloudNet's VPN controller (paper 000, section 3.1) keeps a ruleset of which endpoints may be
//! connected. Here the realm's key signs it and each host verifies it, so the controller need not
//! be trusted.

use crate::enrolment::TokenId;
use crate::key::RealmId;
use crate::limits::{
    ADDRESS_BYTES_MAX, GATEWAY_ADDRESSES_MAX, GATEWAY_SITES_MAX, HOSTS_MAX, MTU_MIN,
    NETWORK_MEMBERS_MAX, NETWORKS_MAX, RULESET_BYTES_MAX, RULESET_LIFETIME_S_MAX,
    SERVER_ADDRESSES_MAX, SERVERS_MAX, TOMBSTONES_MAX, VLAN_RANGES_MAX,
};
use crate::signed::{Document, DocumentError, Signed, Verified};
use crate::text::{is_name, shown};
use longhaul_protocol::HostId;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::net::IpAddr;

/// A ruleset as it travels.
pub type SignedRuleset = Signed<Ruleset>;
/// A verified ruleset.
pub type VerifiedRuleset = Verified<Ruleset>;

/// Identifies a network for ever. The operator's tool draws it at random.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, Default,
)]
pub struct NetworkId(pub [u8; 8]);

pub use longhaul_protocol::StoreId;

/// One version of what holds in a realm.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ruleset {
    /// The realm.
    pub realm: RealmId,
    /// From 1; a host never takes a lower one than it has.
    pub version: u64,
    /// When it was signed, in seconds since 1970 by the operator's clock.
    pub issued_s: u64,
    /// When it ends, in seconds since 1970.
    pub expires_s: u64,
    /// The members. One id and one name each.
    pub hosts: Vec<HostEntry>,
    /// The networks. One id and one name each.
    pub networks: Vec<NetworkEntry>,
    /// Hosts that were removed: an enrolment by a token does not bring them back.
    pub removed: Vec<Tombstone>,
    /// Tokens that enrol nobody any more.
    pub revoked: Vec<TokenId>,
    /// The rendezvous servers.
    pub servers: Vec<ServerEntry>,
    /// The server that decides in-doubt handovers, if the realm has one.
    pub arbiter: Option<Arbiter>,
}

/// A member.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostEntry {
    /// Its identity.
    pub id: HostId,
    /// Its name in the realm.
    pub name: String,
    /// Its site, such as `paris`.
    pub site: String,
    /// What it may do at other hosts.
    pub scope: Scope,
    /// The token that it joined with. That settles the token: no other host has joined with it.
    pub token: Option<TokenId>,
}

/// The permissions of a member at other members, as in the transport's trust store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Scope {
    /// It may query: plans, a host's resources, the speed of the link.
    pub may_query: bool,
    /// It may send guests.
    pub may_send_guests: bool,
}

/// A network: an isolated Ethernet segment over many hosts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetworkEntry {
    /// Its id.
    pub id: NetworkId,
    /// Its name.
    pub name: String,
    /// The hosts that may have a port in it.
    pub members: Vec<HostId>,
    /// Which VLAN tags its frames may carry.
    pub vlans: VlanPolicy,
    /// Largest payload of a frame, in bytes.
    pub mtu: u16,
    /// The way out, if the network has one.
    pub gateway: Option<Gateway>,
}

/// Which VLAN tags (IEEE 802.1Q) the frames of a network may carry.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum VlanPolicy {
    /// None: tagged frames are dropped.
    Untagged,
    /// Any.
    Any,
    /// Untagged frames, and tags in these ranges: ascending, without overlap.
    Only(Vec<VlanRange>),
}

/// VLANs from `first` to `last`, both included, from 1 to 4094.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct VlanRange {
    /// The first one.
    pub first: u16,
    /// The last one.
    pub last: u16,
}

/// A gateway with the same addresses at several sites, so that a guest that moved leaves by the
/// near one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gateway {
    /// Its addresses in the network.
    pub addresses: Vec<GatewayAddress>,
    /// Its MAC address.
    pub mac: [u8; 6],
    /// The sites whose hosts have it; none if all have.
    pub sites: Vec<String>,
}

/// An address of a gateway, and the subnet that it is in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct GatewayAddress {
    /// The address.
    pub ip: IpAddr,
    /// The bits that all addresses of the subnet begin with.
    pub prefix_bits: u8,
}

impl GatewayAddress {
    /// Returns whether this can be the address of a station in its subnet, which has room for
    /// another one.
    fn is_sound(self) -> bool {
        let usable = !self.ip.is_unspecified() && !self.ip.is_multicast() && !self.ip.is_loopback();
        let (address, bits) = match self.ip {
            IpAddr::V4(ip) => (u128::from(ip.to_bits()), 32_u8),
            IpAddr::V6(ip) => (ip.to_bits(), 128),
        };
        let Some(of_station) = bits.checked_sub(self.prefix_bits) else {
            return false;
        };
        if !usable || self.prefix_bits == 0 || of_station < 2 {
            return false;
        }
        let mask = (1 << of_station) - 1;
        let station = address & mask;
        // Neither the subnet itself nor all of its stations.
        station != 0 && (station != mask || self.ip.is_ipv6())
    }
}

impl std::fmt::Display for GatewayAddress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.ip, self.prefix_bits)
    }
}

impl std::str::FromStr for GatewayAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let bad = || {
            format!(
                "`{}` is not an address of a gateway: write ADDRESS/BITS, such as 10.0.0.1/24",
                shown(text)
            )
        };
        let (ip, bits) = text.split_once('/').ok_or_else(bad)?;
        let address = Self {
            ip: ip.parse().map_err(|_| bad())?,
            prefix_bits: bits.parse().map_err(|_| bad())?,
        };
        match address.is_sound() {
            true => Ok(address),
            false => Err(format!(
                "`{address}` is not an address that a station of a subnet can have"
            )),
        }
    }
}

impl Gateway {
    /// Returns whether a host at this site has the gateway, if it is a member of the network.
    pub fn is_at(&self, site: &str) -> bool {
        self.sites.is_empty() || self.sites.iter().any(|listed| listed == site)
    }
}

/// A removed host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tombstone {
    /// Its identity.
    pub id: HostId,
    /// When it was removed, in seconds since 1970. For people.
    pub removed_s: u64,
}

/// A rendezvous server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServerEntry {
    /// Its identity, which it proves at each connection.
    pub id: HostId,
    /// Its addresses, the preferred one first: `name:port` for UDP, `tcp/name:port` for TCP, and
    /// `stun/name:port` for STUN alone, of this or any other server.
    pub addresses: Vec<String>,
}

/// What precedes an address over TCP.
const TCP: &str = "tcp/";
/// What precedes an address that only answers STUN.
const STUN: &str = "stun/";

impl ServerEntry {
    /// Returns its addresses for QUIC over UDP.
    pub fn udp_addresses(&self) -> impl Iterator<Item = &str> {
        let addresses = self.addresses.iter().map(String::as_str);
        addresses.filter(|address| !address.starts_with(TCP) && !address.starts_with(STUN))
    }

    /// Returns its addresses for TLS over TCP, without the prefix.
    pub fn tcp_addresses(&self) -> impl Iterator<Item = &str> {
        let addresses = self.addresses.iter().map(String::as_str);
        addresses.filter_map(|address| address.strip_prefix(TCP))
    }

    /// Returns the addresses for STUN alone, without the prefix. The way in which a NAT maps ports
    /// is only seen at two addresses or more.
    pub fn stun_addresses(&self) -> impl Iterator<Item = &str> {
        let addresses = self.addresses.iter().map(String::as_str);
        addresses.filter_map(|address| address.strip_prefix(STUN))
    }
}

/// The server that gives leases. Exactly one does, since two would need consensus.
///
/// Both ends of a handover agree on the store when it begins, and accept leases of this store only.
/// So a handover never sees the leases of two stores, whenever the arbiter changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Arbiter {
    /// One of the ruleset's servers.
    pub server: HostId,
    /// Its lease store. A server with another one gives no leases.
    pub store: StoreId,
}

/// Why a ruleset does not replace the one that a host has.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NotNewer {
    /// The same ruleset.
    #[error("ruleset version {version} is in force already")]
    Same {
        /// Its version.
        version: u64,
    },
    /// An older one. It may be a replay.
    #[error("ruleset version {got} is older than version {have}, which is in force")]
    Older {
        /// The version of the ruleset.
        got: u64,
        /// The version in force.
        have: u64,
    },
    /// Two rulesets with one version, both signed by the realm.
    #[error(
        "the realm's key signed two rulesets of version {version}: the first one stays; sign \
         version {} from one copy of the realm", .version + 1
    )]
    Forked {
        /// The version.
        version: u64,
    },
}

impl VlanPolicy {
    /// Returns whether a frame may carry this tag; `None` is a frame without one.
    pub fn allows(&self, vlan: Option<u16>) -> bool {
        match (self, vlan) {
            (_, None) | (Self::Any, _) => true,
            (Self::Untagged, _) => false,
            (Self::Only(ranges), Some(vlan)) => {
                let within = |range: &VlanRange| (range.first..=range.last).contains(&vlan);
                ranges.iter().any(within)
            }
        }
    }

    fn is_sound(&self) -> bool {
        let Self::Only(ranges) = self else {
            return true;
        };
        let mut before = 0;
        ranges.len() <= VLAN_RANGES_MAX
            && ranges.iter().all(|range| {
                let sound = before < range.first && range.first <= range.last;
                before = range.last;
                sound && range.last <= 4094
            })
    }
}

impl Ruleset {
    /// Returns a member by its id.
    pub fn host(&self, id: HostId) -> Option<&HostEntry> {
        self.hosts.iter().find(|host| host.id == id)
    }

    /// Returns whether a host was removed.
    pub fn is_removed(&self, id: HostId) -> bool {
        self.removed.iter().any(|tombstone| tombstone.id == id)
    }

    /// Returns the entry of a server.
    pub fn server(&self, id: HostId) -> Option<&ServerEntry> {
        self.servers.iter().find(|server| server.id == id)
    }

    /// Returns what an operator should know before signing this ruleset after `previous`.
    pub fn warnings_after(&self, previous: &Ruleset) -> Vec<String> {
        let mut warnings = Vec::new();
        if self.version <= previous.version {
            warnings.push(format!(
                "version {} does not replace version {}: hosts will refuse it",
                self.version, previous.version
            ));
        }
        if let Some(old) = previous.arbiter
            && self.arbiter.map(|arbiter| arbiter.store) != Some(old.store)
        {
            let text = "handovers that began under the old arbiter lose it: an operator resolves \
                        those in doubt";
            warnings.push(text.to_owned());
        }
        let gone = previous.hosts.iter().filter(|host| {
            host.token.is_some() && self.host(host.id).is_none() && !self.is_removed(host.id)
        });
        warnings.extend(gone.map(|host| {
            format!(
                "`{}` joined by a token and has no tombstone: its enrolment brings it back",
                shown(&host.name)
            )
        }));
        warnings
    }

    fn check_hosts(&self) -> Result<(), String> {
        limit("hosts", self.hosts.len(), HOSTS_MAX)?;
        limit("removed hosts", self.removed.len(), TOMBSTONES_MAX)?;
        limit("revoked tokens", self.revoked.len(), TOMBSTONES_MAX)?;
        let (mut ids, mut names) = (BTreeSet::new(), BTreeSet::new());
        let mut tokens = BTreeSet::new();
        let removed: BTreeSet<HostId> = self.removed.iter().map(|gone| gone.id).collect();
        for host in &self.hosts {
            name("host", &host.name)?;
            name("site", &host.site)?;
            if !names.insert(host.name.to_ascii_lowercase()) {
                return Err(format!(
                    "two hosts have the name `{}`: rename one",
                    host.name
                ));
            }
            if !ids.insert(host.id) {
                return Err(format!("host `{}` is listed twice", host.name));
            }
            if removed.contains(&host.id) {
                return Err(format!(
                    "host `{}` is listed and removed: delete one of both",
                    host.name
                ));
            }
            if host.token.is_some_and(|token| !tokens.insert(token)) {
                return Err(format!(
                    "two hosts joined with the token of `{}`",
                    host.name
                ));
            }
        }
        Ok(())
    }

    fn check_networks(&self) -> Result<(), String> {
        limit("networks", self.networks.len(), NETWORKS_MAX)?;
        let members = self.networks.iter().map(|network| network.members.len());
        limit("members of networks", members.sum(), NETWORK_MEMBERS_MAX)?;
        let hosts: BTreeSet<HostId> = self.hosts.iter().map(|host| host.id).collect();
        let (mut ids, mut names) = (BTreeSet::new(), BTreeSet::new());
        for network in &self.networks {
            name("network", &network.name)?;
            let of = &network.name;
            if !names.insert(of.to_ascii_lowercase()) {
                return Err(format!("two networks have the name `{of}`: rename one"));
            }
            if !ids.insert(network.id) {
                return Err(format!("the id of network `{of}` is used twice"));
            }
            let members: BTreeSet<&HostId> = network.members.iter().collect();
            if members.len() != network.members.len() {
                return Err(format!("network `{of}` lists a member twice"));
            }
            if let Some(stranger) = members.into_iter().find(|id| !hosts.contains(id)) {
                return Err(format!(
                    "network `{of}` has the member {stranger}, which is no host of the realm"
                ));
            }
            if !network.vlans.is_sound() {
                return Err(format!(
                    "the VLANs of network `{of}` are not ascending ranges within 1 to 4094"
                ));
            }
            if network.mtu < MTU_MIN {
                return Err(format!("the MTU of network `{of}` is below {MTU_MIN}"));
            }
            network
                .gateway
                .as_ref()
                .map_or(Ok(()), |gateway| check_gateway(of, gateway))?;
        }
        Ok(())
    }

    fn check_servers(&self) -> Result<(), String> {
        limit("servers", self.servers.len(), SERVERS_MAX)?;
        let ids: BTreeSet<HostId> = self.servers.iter().map(|server| server.id).collect();
        if ids.len() != self.servers.len() {
            return Err("a rendezvous server is listed twice".to_owned());
        }
        self.servers.iter().try_for_each(check_server)?;
        match self.arbiter {
            Some(arbiter) if !ids.contains(&arbiter.server) => {
                Err("the arbiter is none of the realm's rendezvous servers".to_owned())
            }
            _ => Ok(()),
        }
    }

    fn check_times(&self) -> Result<(), String> {
        if self.version == 0 {
            return Err("the version of a ruleset is at least 1".to_owned());
        }
        let lifetime = self.expires_s.checked_sub(self.issued_s);
        match lifetime {
            Some(1..=RULESET_LIFETIME_S_MAX) => Ok(()),
            _ => Err(format!(
                "a ruleset ends after its issue, at most {RULESET_LIFETIME_S_MAX} s later"
            )),
        }
    }
}

impl Document for Ruleset {
    const PURPOSE: &'static str = "longhaul realm ruleset";
    const NAME: &'static str = "ruleset";
    const BYTES_MAX: usize = RULESET_BYTES_MAX;

    fn realm(&self) -> RealmId {
        self.realm
    }

    fn check(&self) -> Result<(), DocumentError> {
        self.check_times()
            .and_then(|()| self.check_hosts())
            .and_then(|()| self.check_networks())
            .and_then(|()| self.check_servers())
            .map_err(DocumentError::Content)
    }
}

impl VerifiedRuleset {
    /// Returns whether this ruleset replaces the one in force, and why not.
    pub fn replaces(&self, in_force: Option<&VerifiedRuleset>) -> Result<(), NotNewer> {
        let Some(in_force) = in_force else {
            return Ok(());
        };
        let (got, have) = (self.content().version, in_force.content().version);
        if got < have {
            return Err(NotNewer::Older { got, have });
        }
        if got > have {
            return Ok(());
        }
        match self.signed().bytes == in_force.signed().bytes {
            true => Err(NotNewer::Same { version: got }),
            false => Err(NotNewer::Forked { version: got }),
        }
    }
}

fn check_gateway(of: &str, gateway: &Gateway) -> Result<(), String> {
    let addresses = gateway.addresses.len();
    if addresses == 0 || addresses > GATEWAY_ADDRESSES_MAX {
        return Err(format!(
            "the gateway of network `{of}` needs 1 to {GATEWAY_ADDRESSES_MAX} addresses"
        ));
    }
    let unusable = gateway.addresses.iter().find(|address| !address.is_sound());
    if let Some(unusable) = unusable {
        return Err(format!(
            "the gateway of network `{of}` cannot have the address {unusable}"
        ));
    }
    let ips: BTreeSet<IpAddr> = gateway.addresses.iter().map(|address| address.ip).collect();
    if ips.len() != addresses {
        return Err(format!(
            "the gateway of network `{of}` has an address twice"
        ));
    }
    if gateway.mac[0] & 1 != 0 || gateway.mac == [0; 6] {
        return Err(format!("the MAC of the gateway of `{of}` is no station's"));
    }
    limit("sites of a gateway", gateway.sites.len(), GATEWAY_SITES_MAX)?;
    gateway.sites.iter().try_for_each(|site| name("site", site))
}

/// Checks an entry of a server, in a ruleset or in a token.
pub(crate) fn check_server(server: &ServerEntry) -> Result<(), String> {
    let count = server.addresses.len();
    if count == 0 || count > SERVER_ADDRESSES_MAX {
        return Err(format!(
            "a rendezvous server needs 1 to {SERVER_ADDRESSES_MAX} addresses"
        ));
    }
    let bad = |address: &&String| {
        let port = address.rsplit_once(':').map(|(_, port)| port.parse());
        let port = matches!(port, Some(Ok(1_u16..)));
        !port || address.len() > ADDRESS_BYTES_MAX || !address.bytes().all(|b| b.is_ascii_graphic())
    };
    match server.addresses.iter().find(bad) {
        Some(address) => Err(format!(
            "`{}` is not the address of a server (name:port)",
            shown(address)
        )),
        None => Ok(()),
    }
}

pub(crate) fn limit(what: &str, count: usize, limit: usize) -> Result<(), String> {
    match count <= limit {
        true => Ok(()),
        false => Err(format!("{count} {what}: the limit is {limit}")),
    }
}

pub(crate) fn name(what: &str, text: &str) -> Result<(), String> {
    match is_name(text) {
        true => Ok(()),
        false => Err(format!(
            "`{}` is not a name of a {what}: letters, digits, `.`, `-`, `_`, at most 63",
            shown(text)
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_gateways_are_those_of_stations() {
        for text in ["10.0.0.1/24", "10.0.0.2/30", "fd00::1/64", "192.0.2.254/24"] {
            let address: GatewayAddress = text.parse().unwrap();
            assert_eq!(address.to_string(), text);
        }
        for text in [
            "10.0.0.1",
            "10.0.0.1/",
            "10.0.0.1/33",
            "10.0.0.1/31",
            "10.0.0.1/0",
            "10.0.0.0/24",
            "10.0.0.255/24",
            "0.0.0.0/24",
            "127.0.0.1/8",
            "224.0.0.1/24",
            "fd00::/64",
            "fd00::1/129",
            "gateway/24",
        ] {
            let refused = text.parse::<GatewayAddress>();
            assert!(refused.is_err(), "{text}: {refused:?}");
        }
    }

    #[test]
    fn a_gateway_is_checked_and_is_at_its_sites() {
        let good = Gateway {
            addresses: vec!["10.0.0.1/24".parse().unwrap()],
            mac: [2, 0x6c, 0x68, 0, 0, 1],
            sites: vec!["lyon".to_owned()],
        };
        assert_eq!(check_gateway("blue", &good), Ok(()));
        assert!(good.is_at("lyon") && !good.is_at("paris"));
        let everywhere = Gateway {
            sites: Vec::new(),
            ..good.clone()
        };
        assert!(everywhere.is_at("paris"));
        let address = |ip: &str, prefix_bits| GatewayAddress {
            ip: ip.parse().unwrap(),
            prefix_bits,
        };
        let with = |change: fn(&mut Gateway)| {
            let mut gateway = good.clone();
            change(&mut gateway);
            check_gateway("blue", &gateway).unwrap_err()
        };
        for (said, wanted) in [
            (with(|it| it.addresses.clear()), "1 to 4"),
            (with(|it| it.addresses.push(it.addresses[0])), "twice"),
            (with(|it| it.mac[0] = 3), "MAC"),
            (with(|it| it.mac = [0; 6]), "MAC"),
            (with(|it| it.sites[0].push(' ')), "site"),
        ] {
            assert!(said.contains(wanted), "{said}");
        }
        let mut bad = good.clone();
        bad.addresses = vec![address("10.0.0.0", 24)];
        let said = check_gateway("blue", &bad).unwrap_err();
        assert!(said.contains("10.0.0.0/24"), "{said}");
        let mut many = good;
        many.addresses = (1..6)
            .map(|last| address(&format!("10.0.0.{last}"), 24))
            .collect();
        assert!(check_gateway("blue", &many).is_err());
    }
}
