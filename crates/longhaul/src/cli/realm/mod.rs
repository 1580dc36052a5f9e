//! Implements the commands of a realm's operator. They work on the operator's folder and talk to
//! rendezvous servers, so they need no agent.

mod folder;
mod publish;

pub(crate) use folder::hex;

use crate::cli::args::{
    FolderArgs, InviteArgs, NetworkArgs, NetworkCommand, RealmArgs, RealmCommand, RemoveHostArgs,
};
use crate::cli::error::CliError;
use crate::cli::output::Output;
use crate::cli::paint::{Line, Tone, head, table};
use crate::cli::{done, now_unix_ms, show};
use folder::{
    Folder, PlannedGateway, PlannedNetwork, PlannedServer, PlannedToken, gateway_address, vlans,
};
use longhaul_api::Scope as ApiScope;
use longhaul_realm::enrolment::{Authorisation, TokenId};
use longhaul_realm::ruleset::{NetworkId, Ruleset, Scope, ServerEntry};
use longhaul_realm::signed::sign;
use longhaul_realm::token::{Token, TokenError};
use publish::{Servers, confirm};
use serde_json::json;
use std::path::PathBuf;

const DAY_S: u64 = 86_400;
/// How long after the end of a token its enrolment counts without a ruleset.
const CONFIRM_S: u64 = 30 * DAY_S;
const NEXT: &str = "longhaul realm publish";

fn path(args: FolderArgs) -> Result<PathBuf, CliError> {
    let named = args
        .folder
        .or_else(|| std::env::var_os("LONGHAUL_REALM").map(PathBuf::from));
    let config = || {
        let home = std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".config"));
        let config = std::env::var_os("XDG_CONFIG_HOME")
            .map(PathBuf::from)
            .or(home);
        config.map(|config| config.join("longhaul/realm"))
    };
    named
        .or_else(config)
        .ok_or_else(|| CliError::usage("no folder of a realm is known", "name it: --folder FOLDER"))
}

fn now_s() -> u64 {
    now_unix_ms() / 1000
}

/// Says what was changed, and how it comes into force.
fn changed(output: &Output, folder: &Folder, text: String) -> Result<(), CliError> {
    let last = folder.last()?;
    // What cannot be signed is named now and not later.
    let next = folder.next(last.as_ref(), now_s())?;
    sign(&next, &folder.key).map_err(|error| CliError::usage(error.to_string(), FIX))?;
    folder.save()?;
    show(
        output,
        &json!({ "changed": text, "in_force": false }),
        || {
            let mut lines = done(text.clone());
            lines.push(Line::text("  to put it in force:  ").tone(Tone::Strong, NEXT));
            lines
        },
    )
}

const FIX: &str = "nothing was changed";

/// Runs `longhaul realm`.
pub(crate) async fn realm(output: &Output, args: RealmArgs) -> Result<u8, CliError> {
    let path = path(args.folder)?;
    match args.command {
        RealmCommand::Create { name } => {
            let folder = Folder::create(&path, &name)?;
            let id = folder.realm().to_string();
            let shown = path.display().to_string();
            show(output, &json!({ "id": id, "folder": shown }), || {
                let mut lines = done(format!("realm {name} is made, in {shown}"));
                lines.push(Line::text(format!("  id {id}")));
                lines.push(Line::text(
                    "  realm.key signs everything: keep a copy of it offline",
                ));
                lines.push(
                    Line::text("  at a rendezvous server:  ")
                        .tone(Tone::Strong, format!("longhaul rendezvous --realm {id}")),
                );
                lines
            })?;
        }
        RealmCommand::Show => shown(output, &Folder::open(&path)?)?,
        RealmCommand::AddServer {
            fingerprint,
            addresses,
        } => {
            let mut folder = Folder::open(&path)?;
            let server = PlannedServer { addresses };
            folder.plan.server.insert(fingerprint.to_string(), server);
            changed(
                output,
                &folder,
                format!("server {fingerprint} serves the realm"),
            )?;
        }
        RealmCommand::RemoveServer { fingerprint } => {
            let mut folder = Folder::open(&path)?;
            if folder
                .plan
                .server
                .remove(&fingerprint.to_string())
                .is_none()
            {
                let hint = "`longhaul realm show` lists the servers";
                return Err(CliError::usage("the realm has no such server", hint));
            }
            changed(
                output,
                &folder,
                format!("server {fingerprint} serves the realm no longer"),
            )?;
        }
        RealmCommand::Sign => {
            let mut folder = Folder::open(&path)?;
            let (version, warnings) = sign_next(&mut folder)?;
            say_signed(output, version, &warnings)?;
        }
        RealmCommand::Publish => return publish(output, Folder::open(&path)?).await,
    }
    Ok(0)
}

fn say_signed(output: &Output, version: u64, warnings: &[String]) -> Result<(), CliError> {
    show(
        output,
        &json!({ "version": version, "warnings": warnings }),
        || {
            let mut lines = done(format!("version {version} is signed"));
            lines.extend(
                warnings
                    .iter()
                    .map(|text| Line::text(format!("  note: {text}"))),
            );
            lines.push(Line::text("  to give it to the servers:  ").tone(Tone::Strong, NEXT));
            lines
        },
    )
}

/// Signs the working copy. Returns the version, and what the operator should know.
fn sign_next(folder: &mut Folder) -> Result<(u64, Vec<String>), CliError> {
    let last = folder.last()?;
    let next = folder.next(last.as_ref(), now_s())?;
    let warnings = last.map_or_else(Vec::new, |last| next.warnings_after(&last));
    let signed = sign(&next, &folder.key);
    let signed =
        signed.map_err(|error| CliError::usage(error.to_string(), "correct realm.toml"))?;
    folder.keep(signed.signed().clone())?;
    Ok((next.version, warnings))
}

/// Returns whether the working copy says something else than what was signed last, or the end of
/// that is near.
fn differs(last: &Ruleset, next: &Ruleset) -> bool {
    let lifetime_s = last.expires_s.saturating_sub(last.issued_s);
    let old = now_s() > last.issued_s.saturating_add(lifetime_s / 2);
    let comparable = Ruleset {
        version: last.version,
        issued_s: last.issued_s,
        expires_s: last.expires_s,
        ..next.clone()
    };
    old || comparable != *last
}

async fn publish(output: &Output, mut folder: Folder) -> Result<u8, CliError> {
    let last = folder.last()?;
    let mut wanted = folder.servers()?;
    // Servers that are removed learn of it too.
    for server in last.iter().flat_map(|last| &last.servers) {
        if wanted.iter().all(|one| one.id != server.id) {
            wanted.push(server.clone());
        }
    }
    if wanted.is_empty() {
        return Err(CliError::usage(
            "the realm has no rendezvous server",
            "longhaul realm add-server FINGERPRINT ADDRESS",
        ));
    }
    let mut servers = Servers::connect(&folder, wanted).await?;
    let (mut joined, mut notes) = (Vec::new(), Vec::new());
    if let (Some(last), Some(signed)) = (&last, folder.signed.clone()) {
        let answers = servers.give(&signed).await;
        let newest = answers.iter().map(|(version, _)| *version).max();
        if let Some(newest) = newest.filter(|newest| *newest > last.version) {
            let text = format!(
                "the servers have version {newest}, and this folder signed version {} last",
                last.version
            );
            return Err(CliError::usage(
                text,
                "another copy of the folder is newer: use it",
            ));
        }
        let enrolments: Vec<_> = answers.into_iter().flat_map(|(_, some)| some).collect();
        (joined, notes) = confirm(&mut folder, last, &enrolments, now_s());
        folder.save()?;
    }
    let next = folder.next(last.as_ref(), now_s())?;
    let mut version = last.as_ref().map_or(0, |last| last.version);
    if last.as_ref().is_none_or(|last| differs(last, &next)) {
        let (signed, warnings) = sign_next(&mut folder)?;
        version = signed;
        notes.extend(warnings);
    }
    if let Some(signed) = folder.signed.clone() {
        servers.give(&signed).await;
    }
    let result = published(output, version, &joined, &notes, &servers);
    servers.close().await;
    result
}

fn published(
    output: &Output,
    version: u64,
    joined: &[String],
    notes: &[String],
    servers: &Servers,
) -> Result<u8, CliError> {
    let servers = &servers.reached;
    let taken = servers.iter().filter(|one| one.error().is_none()).count();
    if taken == 0 {
        let errors = servers.iter().filter_map(publish::Reached::error);
        let text = format!(
            "version {version} is signed, and no server took it: {}",
            errors.collect::<Vec<_>>().join("; ")
        );
        return Err(CliError::failed("realm", text));
    }
    let shown: Vec<_> = servers
        .iter()
        .map(|one| {
            let (id, addresses) = (one.server.id.to_string(), &one.server.addresses);
            json!({ "fingerprint": id, "addresses": addresses, "error": one.error() })
        })
        .collect();
    let document = json!({
        "version": version, "joined": joined, "notes": notes, "servers": shown,
    });
    show(output, &document, || {
        let mut lines = done(format!(
            "version {version} is in force at {taken} of {} servers",
            servers.len()
        ));
        let new = joined
            .iter()
            .map(|name| Line::text(format!("  joined: {name}")));
        lines.extend(new);
        lines.extend(
            notes
                .iter()
                .map(|text| Line::text(format!("  note: {text}"))),
        );
        for one in servers {
            if let Some(error) = one.error() {
                let at = one.server.addresses.join(" ");
                lines.push(Line::text(format!("  not at {at}: {error}")));
            }
        }
        lines
    })?;
    Ok(0)
}

fn shown(output: &Output, folder: &Folder) -> Result<(), CliError> {
    let last = folder.last()?;
    let next = folder.next(last.as_ref(), now_s())?;
    let pending = last.as_ref().is_none_or(|last| differs(last, &next));
    let plan = &folder.plan;
    let version = last.as_ref().map(|last| last.version);
    let document = json!({
        "id": folder.realm().to_string(),
        "name": plan.name,
        "folder": folder.path().display().to_string(),
        "version": version,
        "expires_s": last.as_ref().map(|last| last.expires_s),
        "changed": pending,
        "plan": plan,
    });
    show(output, &document, || {
        let mut lines = vec![Line::default().tone(Tone::Strong, plan.name.clone())];
        let mut line = |name: &str, text: String| {
            lines.push(Line::text(format!("  {name}")).column(16).plain(text));
        };
        line("id", folder.realm().to_string());
        line("folder", folder.path().display().to_string());
        line(
            "version",
            version.map_or("none is signed".to_owned(), |it| it.to_string()),
        );
        if let Some(last) = &last {
            let left_s = last.expires_s.saturating_sub(now_s());
            line("ends in", format!("{} days", (left_s + DAY_S / 2) / DAY_S));
        }
        for (id, server) in &plan.server {
            line("server", format!("{id} {}", server.addresses.join(" ")));
        }
        for (name, host) in &plan.host {
            line(
                "host",
                format!("{name} at {}, {}", host.site, host.fingerprint),
            );
        }
        for (name, network) in &plan.network {
            line("network", format!("{name}: {}", network.members.join(", ")));
        }
        for token in plan
            .token
            .values()
            .filter(|token| token.expires_s > now_s())
        {
            line("invited", token.host.clone());
        }
        if pending {
            lines.push(Line::text("  not in force yet:  ").tone(Tone::Strong, NEXT));
        }
        lines
    })
}

/// Runs `longhaul network`.
pub(crate) fn network(output: &Output, args: NetworkArgs) -> Result<u8, CliError> {
    let mut folder = Folder::open(&path(args.folder)?)?;
    match args.command.unwrap_or(NetworkCommand::List) {
        NetworkCommand::List => networks(output, &folder)?,
        NetworkCommand::Create {
            name,
            mtu,
            vlans: tags,
        } => {
            if folder.plan.network.contains_key(&name) {
                let text = format!("the realm has a network {name}");
                return Err(CliError::usage(text, "name another one"));
            }
            vlans(&tags).map_err(|text| CliError::usage(text, FIX))?;
            let network = PlannedNetwork {
                id: hex(&random::<8>()?),
                mtu,
                vlans: tags,
                members: Vec::new(),
                gateway: None,
            };
            folder.plan.network.insert(name.clone(), network);
            changed(output, &folder, format!("network {name} is made"))?;
        }
        NetworkCommand::Add { network, hosts } => {
            let members = &mut member_of(&mut folder, &network)?.members;
            let new = hosts.iter().filter(|host| !members.contains(host)).cloned();
            let new: Vec<String> = new.collect();
            members.extend(new);
            changed(
                output,
                &folder,
                format!("{} may use {network}", hosts.join(", ")),
            )?;
        }
        NetworkCommand::Gateway {
            network,
            addresses,
            sites,
            none,
        } => {
            let text = gateway(&mut folder, &network, (addresses, sites), none)?;
            changed(output, &folder, text)?;
        }
        NetworkCommand::Remove { network, hosts } if hosts.is_empty() => {
            member_of(&mut folder, &network)?;
            folder.plan.network.remove(&network);
            changed(output, &folder, format!("network {network} is removed"))?;
        }
        NetworkCommand::Remove { network, hosts } => {
            let members = &mut member_of(&mut folder, &network)?.members;
            if let Some(stranger) = hosts.iter().find(|host| !members.contains(host)) {
                let text = format!("{stranger} is no member of {network}");
                return Err(CliError::usage(
                    text,
                    "`longhaul network list` shows the members",
                ));
            }
            members.retain(|member| !hosts.contains(member));
            changed(
                output,
                &folder,
                format!("{} may not use {network}", hosts.join(", ")),
            )?;
        }
    }
    Ok(0)
}

/// Gives a network a gateway, or removes it. Returns what was changed.
fn gateway(
    folder: &mut Folder,
    network: &str,
    (addresses, sites): (Vec<String>, Vec<String>),
    none: bool,
) -> Result<String, CliError> {
    if none {
        let network_entry = member_of(folder, network)?;
        return match network_entry.gateway.take() {
            Some(_) => Ok(format!("network {network} has no gateway any more")),
            None => {
                let text = format!("network {network} has no gateway");
                Err(CliError::usage(text, FIX))
            }
        };
    }
    for address in &addresses {
        gateway_address(address).map_err(|text| CliError::usage(text, FIX))?;
    }
    let is_known = |site: &&String| folder.plan.host.values().any(|host| host.site == **site);
    if let Some(unknown) = sites.iter().find(|site| !is_known(site)) {
        let text = format!("no host of the realm is at the site {unknown}");
        return Err(CliError::usage(
            text,
            "`longhaul realm show` lists the hosts and their sites",
        ));
    }
    let planned = member_of(folder, network)?;
    // It keeps its MAC address, which guests know.
    let mac = match &planned.gateway {
        Some(before) => before.mac.clone(),
        None => new_mac()?,
    };
    let at = match sites.is_empty() {
        true => "every site".to_owned(),
        false => sites.join(", "),
    };
    let text = format!(
        "network {network} has the gateway {} at {at}",
        addresses.join(", ")
    );
    planned.gateway = Some(PlannedGateway {
        addresses,
        mac,
        sites,
    });
    Ok(text)
}

/// Returns a random MAC address of those that nobody assigns, in hexadecimal digits.
fn new_mac() -> Result<String, CliError> {
    let mut mac = random::<6>()?;
    mac[0] = mac[0] & 0xfc | 2;
    Ok(hex(&mac))
}

fn member_of<'a>(folder: &'a mut Folder, name: &str) -> Result<&'a mut PlannedNetwork, CliError> {
    folder.plan.network.get_mut(name).ok_or_else(|| {
        let text = format!("the realm has no network {name}");
        CliError::usage(text, "`longhaul network create` makes one")
    })
}

fn networks(output: &Output, folder: &Folder) -> Result<(), CliError> {
    let networks = &folder.plan.network;
    show(output, &json!({ "networks": networks }), || {
        if networks.is_empty() {
            return vec![
                Line::text("The realm has no network. To make one:  ")
                    .tone(Tone::Strong, "longhaul network create NAME"),
            ];
        }
        let mut rows = vec![head(&["network", "MTU", "VLANs", "gateway", "hosts"])];
        for (name, network) in networks {
            rows.push(vec![
                Line::text(name.clone()),
                Line::text(network.mtu.to_string()),
                Line::text(network.vlans.clone()),
                Line::text(network.gateway.as_ref().map_or_else(String::new, way_out)),
                Line::text(network.members.join(", ")),
            ]);
        }
        table(rows)
    })
}

fn way_out(gateway: &PlannedGateway) -> String {
    let addresses = gateway.addresses.join(", ");
    match gateway.sites.is_empty() {
        true => addresses,
        false => format!("{addresses} at {}", gateway.sites.join(", ")),
    }
}

fn random<const N: usize>() -> Result<[u8; N], CliError> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes)
        .map_err(|error| CliError::failed("realm", format!("no random numbers: {error}")))?;
    Ok(bytes)
}

/// Runs `longhaul host invite`.
pub(crate) fn invite(output: &Output, args: InviteArgs) -> Result<(), CliError> {
    let mut folder = Folder::open(&path(args.folder.clone())?)?;
    if folder.plan.host.contains_key(&args.name) {
        let text = format!("the realm has a host {}", args.name);
        let hint = "name another one, or remove that one first";
        return Err(CliError::usage(text, hint));
    }
    let authorisation = authorisation(&folder, &args)?;
    let servers: Vec<ServerEntry> = folder.servers()?;
    if servers.is_empty() {
        return Err(CliError::usage(
            "the realm has no rendezvous server at which a host could join",
            "longhaul realm add-server FINGERPRINT ADDRESS",
        ));
    }
    let (issued_s, expires_s) = (authorisation.issued_s, authorisation.expires_s);
    let id = hex(&authorisation.token.0);
    let token = Token::make(authorisation, random()?, servers, &folder.key);
    let token = token.map_err(|error| match error {
        TokenError::Document(error) => CliError::usage(error.to_string(), FIX),
        error => CliError::usage(error.to_string(), FIX),
    })?;
    let name = args.name;
    let planned = PlannedToken {
        host: name.clone(),
        expires_s,
    };
    let plan = &mut folder.plan;
    plan.token.retain(|_, token| token.expires_s > issued_s);
    plan.token.insert(id.clone(), planned);
    folder.save()?;
    let text = token.to_text();
    let document = json!({
        "token": text, "id": id, "host": name, "expires_s": expires_s,
    });
    show(output, &document, || {
        vec![
            Line::text(format!(
                "On {name}, once, within {}:",
                lasts(args.expires.as_secs())
            )),
            Line::default(),
            Line::text(format!("longhaul host join {text}")),
            Line::default(),
            Line::text(
                "Anyone with this line can join as that host: send it over a private channel.",
            ),
        ]
    })
}

/// Returns what the realm allows the host that is invited.
fn authorisation(folder: &Folder, args: &InviteArgs) -> Result<Authorisation, CliError> {
    let network = |wanted: &String| {
        let network = folder.plan.network.get(wanted);
        let id = network.and_then(|network| hex_id(&network.id));
        id.ok_or_else(|| {
            let text = format!("the realm has no network {wanted}");
            CliError::usage(text, "`longhaul network list` shows them")
        })
    };
    let may: Vec<ApiScope> = args.may.iter().filter_map(|may| may.scope()).collect();
    let networks = args.networks.iter().map(network);
    let issued_s = now_s();
    let expires_s = issued_s.saturating_add(args.expires.as_secs());
    Ok(Authorisation {
        realm: folder.realm(),
        token: TokenId(random()?),
        key: folder.key.public(),
        name: args.name.clone(),
        site: args.site.clone(),
        scope: Scope {
            may_query: may.contains(&ApiScope::Query),
            may_send_guests: may.contains(&ApiScope::Send),
        },
        networks: networks.collect::<Result<_, _>>()?,
        issued_s,
        expires_s,
        confirm_s: expires_s.saturating_add(CONFIRM_S),
    })
}

fn lasts(seconds: u64) -> String {
    match seconds {
        ..120 => format!("{seconds} seconds"),
        120..7200 => format!("{} minutes", seconds / 60),
        _ => format!("{} hours", seconds / 3600),
    }
}

fn hex_id(text: &str) -> Option<NetworkId> {
    let number = u64::from_str_radix(text, 16).ok()?;
    Some(NetworkId(number.to_be_bytes()))
}

/// Runs `longhaul host remove`.
pub(crate) fn remove(output: &Output, args: RemoveHostArgs) -> Result<(), CliError> {
    let mut folder = Folder::open(&path(args.folder)?)?;
    let name = args.name;
    let Some(host) = folder.plan.host.remove(&name) else {
        let text = format!("the realm has no host {name}");
        return Err(CliError::usage(
            text,
            "`longhaul realm show` lists the hosts",
        ));
    };
    for network in folder.plan.network.values_mut() {
        network.members.retain(|member| *member != name);
    }
    folder.plan.removed.insert(host.fingerprint, now_s());
    changed(output, &folder, format!("{name} is removed from the realm"))
}
