//! Formats a host's realm.

use super::list::may;
use crate::cli::paint::{Line, Tone};
use longhaul_api::{Realm, RealmGateway, RealmStanding, RealmStatus};

/// Formats the answer to a join.
pub(crate) fn joined(status: &RealmStatus) -> Vec<Line> {
    let name = status
        .realm
        .as_ref()
        .and_then(|realm| realm.name.as_deref());
    let text = format!(
        "this host is in the realm, as {}",
        name.unwrap_or("a member")
    );
    let mut lines = vec![Line::default().tone(Tone::Good, "✓ ").plain(text)];
    lines.extend(realm(status));
    lines
}

/// Formats the realm.
pub(crate) fn realm(status: &RealmStatus) -> Vec<Line> {
    let Some(realm) = &status.realm else {
        return vec![
            Line::text("This host is in no realm. To join one:  ")
                .tone(Tone::Strong, "longhaul host join TOKEN"),
        ];
    };
    let mut lines = Vec::new();
    let mut line = |name: &str, text: String| {
        lines.push(Line::text(format!("  {name}")).column(16).plain(text));
    };
    line("realm", realm.id.clone());
    line("this host", standing(realm));
    line(
        "ruleset",
        match realm.version {
            0 => "none has arrived".to_owned(),
            version => format!("version {version}"),
        },
    );
    for server in &realm.servers {
        let way = server.way.as_deref();
        let state = match (server.registered, way, &server.error) {
            (true, Some(way), _) => format!("registered over {way}"),
            (_, Some(way), _) => format!("connected over {way}"),
            (_, None, Some(error)) => format!("not reached: {error}"),
            (_, None, None) => "not reached".to_owned(),
        };
        line("server", format!("{}: {state}", server.addresses.join(" ")));
    }
    for member in &realm.members {
        let pending = if member.pending {
            ", not confirmed yet"
        } else {
            ""
        };
        let may = may(&member.may);
        line(
            "member",
            format!("{} at {}, may: {may}{pending}", member.name, member.site),
        );
    }
    for network in &realm.networks {
        let here = match (&network.bridge, &network.error) {
            (Some(bridge), _) => format!("; bridge {bridge} here"),
            (None, Some(error)) => format!("; not here: {error}"),
            (None, None) => String::new(),
        };
        line(
            "network",
            format!("{}: {}{here}", network.name, network.members.join(", ")),
        );
        if let Some(gateway) = &network.gateway {
            let lines = way_out(&network.name, gateway);
            lines.into_iter().for_each(|text| line("gateway", text));
        }
    }
    for notice in &realm.notices {
        line("note", notice.clone());
    }
    lines
}

/// Returns how guests in a network get out, in lines.
fn way_out(network: &str, gateway: &RealmGateway) -> Vec<String> {
    let addresses = gateway.addresses.join(", ");
    let here = match (&gateway.device, &gateway.near) {
        (Some(device), _) => format!("device {device} here"),
        (None, Some(near)) => format!("guests here leave by {near}"),
        (None, None) => "guests here have no way out".to_owned(),
    };
    let hosts = gateway.hosts.join(", ");
    let mut lines = vec![format!("{addresses} of {network}, at {hosts}; {here}")];
    lines.extend(gateway.error.clone());
    if gateway.flows > 0 {
        let (flows, elsewhere) = (gateway.flows, gateway.elsewhere);
        lines.push(format!("flows: {flows}, {elsewhere} of them elsewhere"));
    }
    let counts = [
        (gateway.forgotten, "flows not remembered"),
        (gateway.given_up, "flows given up"),
        (gateway.spoofed, "spoofed frames"),
    ];
    let counts = counts.iter().filter(|(count, _)| *count > 0);
    lines.extend(counts.map(|(count, what)| format!("{what}: {count}")));
    lines
}

fn standing(realm: &Realm) -> String {
    let name = realm.name.as_deref().unwrap_or("no member");
    let reason = realm
        .reason
        .as_deref()
        .map_or(String::new(), |reason| format!(": {reason}"));
    match realm.standing {
        RealmStanding::Member => name.to_owned(),
        RealmStanding::Pending => format!("{name}, until the operator confirms it"),
        RealmStanding::Expired | RealmStanding::Stranger => format!("{name}{reason}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::paint::golden;
    use longhaul_api::{RealmMember, RealmNetwork, RealmServer, Scope};

    fn sample() -> RealmStatus {
        let member = |name: &str, may: &[Scope], pending| RealmMember {
            name: name.to_owned(),
            fingerprint: "1111-1111".to_owned(),
            site: "paris".to_owned(),
            may: may.to_vec(),
            pending,
            path: None,
        };
        let server = |registered, way: Option<&str>, error: Option<&str>| RealmServer {
            fingerprint: "2222-2222".to_owned(),
            addresses: vec!["rendezvous.example:7401".to_owned()],
            registered,
            way: way.map(str::to_owned),
            version: 7,
            error: error.map(str::to_owned),
        };
        let realm = Realm {
            id: "c2".repeat(32),
            name: Some("paris-1".to_owned()),
            standing: RealmStanding::Pending,
            reason: None,
            version: 7,
            expires_s: Some(1_800_000_000),
            members: vec![
                member("oslo-1", &[Scope::Query, Scope::Send], false),
                member("paris-1", &[], true),
            ],
            networks: vec![RealmNetwork {
                name: "blue".to_owned(),
                id: "01".repeat(8),
                members: vec!["oslo-1".to_owned(), "paris-1".to_owned()],
                mtu: 1500,
                bridge: Some("lb0000000000001".to_owned()),
                error: None,
                gateway: Some(RealmGateway {
                    addresses: vec!["10.0.0.1/24".to_owned()],
                    mac: "02:6c:68:00:00:01".to_owned(),
                    hosts: vec!["oslo-1".to_owned(), "paris-1".to_owned()],
                    device: Some("lg0000000000001".to_owned()),
                    near: Some("paris-1".to_owned()),
                    flows: 12,
                    elsewhere: 3,
                    forgotten: 0,
                    given_up: 1,
                    spoofed: 2,
                    error: None,
                }),
            }],
            servers: vec![
                server(true, Some("QUIC"), None),
                server(false, None, Some("no answer")),
            ],
            notices: vec!["the disk is full".to_owned()],
        };
        RealmStatus { realm: Some(realm) }
    }

    #[test]
    fn realms() {
        golden::check_lines("realm_joined", &joined(&sample()), 120);
        let mut faulty = sample();
        if let Some(gateway) = faulty
            .realm
            .as_mut()
            .and_then(|realm| realm.networks[0].gateway.as_mut())
        {
            (gateway.device, gateway.flows) = (None, 0);
            (gateway.given_up, gateway.spoofed) = (0, 0);
            gateway.error = Some("cannot start nft: No such file or directory".to_owned());
        }
        golden::check_lines("realm_gateway_faulty", &realm(&faulty), 120);
        golden::check_lines("realm_none", &realm(&RealmStatus { realm: None }), 120);
        let mut removed = sample();
        if let Some(realm) = &mut removed.realm {
            realm.standing = RealmStanding::Stranger;
            realm.reason = Some("the realm removed this host".to_owned());
            (realm.name, realm.version) = (None, 0);
            realm.servers.truncate(1);
            (realm.members, realm.networks) = (Vec::new(), Vec::new());
        }
        golden::check_lines("realm_removed", &realm(&removed), 120);
    }
}
