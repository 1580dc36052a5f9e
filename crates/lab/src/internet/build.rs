//! Builds the parts of an Internet: namespaces, routers, uplinks, hosts and their addresses.

use std::fmt::Write;

use super::access::{Access, HOSTS_MAX, Nat};
use super::router::{self, Router};
use super::{Internet, SERVERS_MAX, Site, SitePlan, SitesPlan, no};
use crate::error::LabError;
use crate::lab::{HOST_NAMES, Host};
use crate::link::spec::LinkSpec;
use crate::link::{self, End, Link};
use crate::netns::Namespace;
use crate::registry::{Claim, LinkRecord};

/// The Internet's name among the ends of links.
pub(super) const INTERNET: &str = "internet";
/// Its number among them; sites count from 1.
const INTERNET_NUMBER: u8 = 254;
/// The interface of a site's router towards its hosts, of a carrier's towards the site, and of the
/// site's towards the carrier.
const INSIDE: &str = "inside";
const TO_SITE: &str = "to-site";
const TO_CARRIER: &str = "to-carrier";
/// A host's interface towards its router.
const HOST_INTERFACE: &str = "to-router";

/// One end of an uplink, without its namespace.
pub(super) struct UplinkEnd {
    number: u8,
    address: String,
}

impl UplinkEnd {
    pub(super) fn end<'a>(&'a self, name: &'a str, namespace: &'a Namespace) -> End<'a> {
        End {
            link: 1,
            name,
            number: self.number,
            address: &self.address,
            namespace,
        }
    }
}

/// Returns the ends of a site's uplink: the site's and the Internet's.
pub(super) fn uplink_ends(site: u8) -> [UplinkEnd; 2] {
    [site, INTERNET_NUMBER].map(|number| UplinkEnd {
        number,
        address: format!("203.0.113.{number}"),
    })
}

/// Returns the IPv6 address of an end of an uplink.
fn uplink_v6(number: u8) -> String {
    format!("2001:db8:ffff::{number:x}")
}

/// Returns the IPv6 prefix of a site, without its length of 48.
fn site_v6(site: u8) -> String {
    format!("2001:db8:{site:x}")
}

/// The addresses inside a site.
struct Inside {
    site: u8,
    public: bool,
    v4: bool,
    v6: bool,
}

impl Inside {
    /// Returns the addresses with the length of the network that is directly reachable. The router
    /// is 0, hosts count from 1.
    fn addresses(&self, host: usize) -> Vec<String> {
        let v4 = match self.public {
            true => format!("198.51.100.{}/29", 8 * usize::from(self.site) + 1 + host),
            false if host == 0 => "192.168.1.1/24".to_owned(),
            false => format!("192.168.1.{}/24", 10 + host),
        };
        let v6 = format!("{}::{:x}/64", site_v6(self.site), 1 + host);
        let wanted = [(self.v4, v4), (self.v6, v6)];
        wanted
            .into_iter()
            .filter_map(|(wanted, address)| wanted.then_some(address))
            .collect()
    }
}

fn without_length(address: &str) -> &str {
    address.split('/').next().unwrap_or_default()
}

/// Returns the command that gives an address to an interface. IPv6 addresses are used at once.
fn add_address(text: &mut String, address: &str, device: &str) {
    let nodad = if address.contains(':') { " nodad" } else { "" };
    // Writing to a string does not fail.
    let _ = writeln!(text, "addr add {address} dev {device}{nodad}");
}

/// Creates a namespace of the laboratory, recorded before.
fn new_namespace(claim: &mut Claim, name: &str, v6: bool) -> Result<Namespace, LabError> {
    let name = format!("lh-{}-{name}", claim.record.id);
    claim.record.routers.push(name.clone());
    claim.save()?;
    let namespace = Namespace::create(&name)?;
    if v6 {
        namespace.enable_ipv6()?;
    }
    Ok(namespace)
}

fn check(plan: &SitesPlan) -> Result<(), LabError> {
    let wrong = |message: String| Err(LabError::Which(message));
    let (sites, limit) = (plan.sites.len(), HOST_NAMES.len());
    if !(1..=limit).contains(&sites) {
        return wrong(format!(
            "a laboratory has between 1 and {limit} sites, not {sites}"
        ));
    }
    if plan.servers > SERVERS_MAX {
        let servers = plan.servers;
        return wrong(format!(
            "a laboratory has at most {SERVERS_MAX} servers, not {servers}"
        ));
    }
    for SitePlan { access, .. } in &plan.sites {
        if !(1..=HOSTS_MAX).contains(&access.hosts) || (access.v4.is_empty() && !access.v6) {
            return wrong(format!("a site cannot be `{access}`"));
        }
    }
    Ok(())
}

impl Internet {
    /// Creates the Internet with its sites, and returns it with the hosts of the sites, in order.
    ///
    /// # Errors
    /// When a part of it cannot be made.
    pub(crate) fn create(
        claim: &mut Claim,
        plan: &SitesPlan,
    ) -> Result<(Self, Vec<Host>), LabError> {
        check(plan)?;
        let namespace = new_namespace(claim, INTERNET, true)?;
        router::forward(&namespace)?;
        // What has no address here is lost without an answer, as on most ways to nowhere.
        namespace.configure("route add blackhole 0.0.0.0/0\nroute add blackhole ::/0\n")?;
        let mut builder = Builder {
            claim,
            internet: &namespace,
            seed: plan.seed,
            number: 0,
        };
        let (mut sites, mut hosts) = (Vec::new(), Vec::new());
        for (name, site) in HOST_NAMES.iter().zip(&plan.sites) {
            let names: Vec<String> = (1..=site.access.hosts)
                .map(|number| format!("{name}-{number}"))
                .collect();
            let (site, of_site) = builder.site(name, &names, &site.access, site.uplink)?;
            sites.push(site);
            hosts.extend(of_site);
        }
        let (mut public, mut singles) = (Vec::new(), Vec::new());
        let servers = (1..=plan.servers).map(|number| format!("rv-{number}"));
        for name in servers.chain(["client".to_owned()]) {
            let names = std::slice::from_ref(&name);
            let (site, host) = builder.site(&name, names, &Access::public(), plan.backbone)?;
            public.push(site);
            singles.extend(host);
        }
        let client = singles.pop().ok_or_else(|| no("client"))?;
        for (server, site) in singles.iter_mut().zip(&public) {
            add_alternates(server, site)?;
        }
        let internet = Self {
            namespace,
            sites,
            servers: singles,
            client,
            public,
        };
        Ok((internet, hosts))
    }
}

/// Gives a server the addresses of a fourth host as well: a far end of several addresses shows how
/// a NAT treats them.
fn add_alternates(server: &mut Host, site: &Site) -> Result<(), LabError> {
    let inside = Inside::of(site.number, &site.access);
    let mut batch = String::new();
    let mut alternates = Vec::new();
    for address in inside.addresses(HOSTS_MAX) {
        add_address(&mut batch, &address, HOST_INTERFACE);
        alternates.push(without_length(&address).to_owned());
    }
    server.namespace().configure(&batch)?;
    server.add_addresses(alternates);
    Ok(())
}

impl Inside {
    fn of(site: u8, access: &Access) -> Self {
        Self {
            site,
            public: access.is_public(),
            v4: !access.v4.is_empty(),
            v6: access.v6,
        }
    }
}

/// What is needed to add sites to an Internet.
struct Builder<'a> {
    claim: &'a mut Claim,
    internet: &'a Namespace,
    seed: u64,
    /// The number of sites so far.
    number: u8,
}

impl Builder<'_> {
    fn site(
        &mut self,
        name: &str,
        names: &[String],
        access: &Access,
        uplink: LinkSpec,
    ) -> Result<(Site, Vec<Host>), LabError> {
        self.number += 1;
        let inside = Inside::of(self.number, access);
        let site_nat = access.v4.first().copied().unwrap_or(Nat::PortRestricted);
        let carrier_nat = access.v4.get(1).copied();
        let to_internet = link::interface(INTERNET);
        let outside = carrier_nat.map_or(to_internet.as_str(), |_| TO_CARRIER);
        let router = self.router(name, site_nat, [outside, INSIDE], access.v6)?;
        let mut routers = vec![router];
        if let Some(nat) = carrier_nat {
            let name = format!("{name}-carrier");
            let carrier = self.router(&name, nat, [&to_internet, TO_SITE], access.v6)?;
            connect_carrier(routers[0].namespace(), &carrier, self.number, access.v6)?;
            routers.push(carrier);
        }
        let outermost = routers.last().ok_or_else(|| no("router"))?;
        let uplink = self.uplink(name, outermost.namespace(), &inside, uplink)?;
        let site = Site {
            name: name.to_owned(),
            number: self.number,
            access: access.clone(),
            asked: uplink.1,
            address: (inside.v4 && !inside.public).then(|| format!("203.0.113.{}", self.number)),
            routers,
            uplink: uplink.0,
        };
        let hosts = self.hosts(names, &site, &inside)?;
        Ok((site, hosts))
    }

    fn router(
        &mut self,
        name: &str,
        nat: Nat,
        interfaces: [&str; 2],
        v6: bool,
    ) -> Result<Router, LabError> {
        let namespace = new_namespace(self.claim, &format!("{name}-router"), v6)?;
        let [_, internet] = uplink_ends(self.number);
        Router::start(namespace, nat, interfaces, &internet.address)
    }

    fn uplink(
        &mut self,
        name: &str,
        outermost: &Namespace,
        inside: &Inside,
        spec: LinkSpec,
    ) -> Result<(Link, LinkSpec), LabError> {
        let number = self.number;
        let ends = uplink_ends(number);
        let ends = [
            ends[0].end(name, outermost),
            ends[1].end(INTERNET, self.internet),
        ];
        // Each link loses frames of its own choice.
        let seed = self.seed.wrapping_add(u64::from(number) << 8);
        let link = Link::create(ends, spec, seed, self.claim)?;
        self.claim.record.links.push(LinkRecord {
            between: ends.map(|end| end.name.to_owned()),
            asked: spec.to_string(),
            control: link.control().socket().to_owned(),
        });
        let (out, back) = (link::interface(INTERNET), link::interface(name));
        let [own, other] = ends.map(|end| end.address);
        outermost.configure(&format!("route add default via {other} dev {out}\n"))?;
        let mut batch = String::new();
        if inside.public {
            let network = format!("198.51.100.{}/29", 8 * u32::from(number));
            let _ = writeln!(batch, "route add {network} via {own} dev {back}");
        }
        if inside.v6 {
            // On the link: the kernel may look for a route to the neighbour before it has noticed
            // that the interface is up.
            let [own, other] = [number, INTERNET_NUMBER].map(uplink_v6);
            let [own_mac, other_mac] = [
                link::hardware_address(1, number, INTERNET_NUMBER),
                link::hardware_address(1, INTERNET_NUMBER, number),
            ];
            outermost.configure(&format!(
                "addr add {own} peer {other} dev {out} nodad\n\
                 neigh replace {other} dev {out} lladdr {other_mac} nud permanent\n\
                 route add default via {other} dev {out} onlink\n"
            ))?;
            let _ = write!(
                batch,
                "addr add {other} peer {own} dev {back} nodad\n\
                 neigh replace {own} dev {back} lladdr {own_mac} nud permanent\n\
                 route add {}::/48 via {own} dev {back} onlink\n",
                site_v6(number)
            );
        }
        self.internet.configure(&batch)?;
        Ok((link, spec))
    }

    fn hosts(
        &mut self,
        names: &[String],
        site: &Site,
        inside: &Inside,
    ) -> Result<Vec<Host>, LabError> {
        let router = site.router()?.namespace();
        let mut batch = format!("link add {INSIDE} type bridge\nlink set dev {INSIDE} up\n");
        let gateways = inside.addresses(0);
        for address in &gateways {
            add_address(&mut batch, address, INSIDE);
        }
        router.configure(&batch)?;
        let mut hosts = Vec::new();
        for (number, name) in (1..).zip(names) {
            let addresses = inside.addresses(number);
            let plain = addresses.iter().map(|it| without_length(it).to_owned());
            let number = u8::try_from(number).unwrap_or(u8::MAX);
            let host = Host::create(self.claim, name, number, plain.collect(), &describe(site))?;
            if inside.v6 {
                host.namespace().enable_ipv6()?;
            }
            let there = router.name();
            let mut batch = format!(
                "link add {HOST_INTERFACE} type veth peer name {name} netns {there}\n\
                 link set dev {HOST_INTERFACE} up\n"
            );
            for address in &addresses {
                add_address(&mut batch, address, HOST_INTERFACE);
            }
            for gateway in &gateways {
                let _ = writeln!(batch, "route add default via {}", without_length(gateway));
            }
            host.namespace().configure(&batch)?;
            router.configure(&format!("link set dev {name} master {INSIDE} up\n"))?;
            hosts.push(host);
        }
        Ok(hosts)
    }
}

/// Joins a site's router and its carrier's.
fn connect_carrier(
    site: &Namespace,
    carrier: &Router,
    number: u8,
    v6: bool,
) -> Result<(), LabError> {
    let carrier = carrier.namespace();
    let there = carrier.name();
    let mut batch = format!(
        "link add {TO_CARRIER} type veth peer name {TO_SITE} netns {there}\n\
         link set dev {TO_CARRIER} up\n\
         addr add 100.64.{number}.2/30 dev {TO_CARRIER}\n"
    );
    let mut other = format!(
        "link set dev {TO_SITE} up\n\
         addr add 100.64.{number}.1/30 dev {TO_SITE}\n"
    );
    let prefix = site_v6(number);
    if v6 {
        let _ = writeln!(batch, "addr add {prefix}:ff::2/64 dev {TO_CARRIER} nodad");
        let _ = writeln!(other, "addr add {prefix}:ff::1/64 dev {TO_SITE} nodad");
        let _ = writeln!(other, "route add {prefix}::/64 via {prefix}:ff::2");
    }
    site.configure(&batch)?;
    carrier.configure(&other)?;
    let mut routes = format!("route add default via 100.64.{number}.1\n");
    if v6 {
        let _ = writeln!(routes, "route add default via {prefix}:ff::1");
    }
    site.configure(&routes)
}

/// Returns how a site's hosts are attached, as a person reads it.
fn describe(site: &Site) -> String {
    let mut text = match (site.access.v4.as_slice(), &site.address) {
        ([], _) => "IPv6 only, behind a firewall".to_owned(),
        ([Nat::NoUdp], Some(address)) => format!("behind {address}, UDP blocked"),
        ([nat], Some(address)) => format!("behind {address}, a {nat} NAT"),
        ([nat, carrier], Some(address)) => {
            format!("behind {address}, a {nat} NAT and a carrier's {carrier} NAT")
        }
        _ => "public".to_owned(),
    };
    if site.access.v6 && !site.access.v4.is_empty() {
        text += match site.access.is_public() {
            true => ", IPv6 too",
            false => ", IPv6 behind a firewall",
        };
    }
    text
}
