//! Joins the hosts of a laboratory's sites to a realm, by the product's own commands: rendezvous
//! servers on the servers of its Internet, and an operator at the client's site.

use crate::agent::Agent;
use crate::error::{During, LabError};
use crate::lab::{Host, Lab};
use crate::process::{own_binary, wait_until};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// The UDP port of rendezvous servers.
const UDP_PORT: u16 = 7401;
/// Their TCP port.
const TCP_PORT: u16 = 443;
/// Their second UDP port, for STUN alone.
const STUN_PORT: u16 = 7402;
/// The time limit for a server's start.
const START_LIMIT: Duration = Duration::from_secs(60);
/// How long hosts have to see what was published.
const PUBLISH_LIMIT: Duration = Duration::from_secs(120);

/// A realm, and its operator's folder.
#[derive(Debug)]
pub struct Realm {
    folder: PathBuf,
    id: String,
    servers: Vec<Rendezvous>,
}

/// A rendezvous server. It ends when this is dropped.
#[derive(Debug)]
struct Rendezvous {
    index: usize,
    process: Child,
    log: PathBuf,
    starts: usize,
}

impl Drop for Rendezvous {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Rendezvous {
    fn start(lab: &Lab, index: usize, realm: &str) -> Result<Self, LabError> {
        let host = lab.internet()?.server(index)?;
        let log = host.folder().join("rendezvous.log");
        let mut server = Self {
            index,
            process: spawn(host, realm, &log)?,
            log,
            starts: 1,
        };
        server.wait()?;
        Ok(server)
    }

    fn said(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    fn wait(&mut self) -> Result<(), LabError> {
        let up = wait_until(START_LIMIT, || {
            self.said().matches(" is ready").count() >= self.starts
                || !matches!(self.process.try_wait(), Ok(None))
        });
        match up && matches!(self.process.try_wait(), Ok(None)) {
            true => Ok(()),
            false => Err(LabError::Late {
                what: "a rendezvous server did not start".to_owned(),
                seconds: START_LIMIT.as_secs(),
                log: self.log.clone(),
            }),
        }
    }

    fn fingerprint(&self) -> String {
        self.field("fingerprint=")
    }

    /// Returns a field of the line in which it said that it is ready.
    fn field(&self, name: &str) -> String {
        let said = self.said();
        let rest = said.split_once(name).map_or("", |(_, rest)| rest);
        let word = rest.split_whitespace().next().unwrap_or_default();
        word.trim_matches('"').to_owned()
    }
}

fn spawn(host: &Host, realm: &str, log: &PathBuf) -> Result<Child, LabError> {
    let output = File::options()
        .create(true)
        .append(true)
        .open(log)
        .during(|| format!("open {}", log.display()))?;
    let mut command = Command::new(own_binary("longhaul")?);
    // All addresses of the host, of both families.
    command
        .args(["rendezvous", "--realm", realm])
        .args(["--listen", &format!("[::]:{UDP_PORT}")])
        .args(["--listen-tcp", &format!("[::]:{TCP_PORT}")])
        .args(["--listen-stun", &format!("[::]:{STUN_PORT}")])
        .arg("--state")
        .arg(host.folder().join("rendezvous"))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(output);
    host.spawn(&mut command)
}

impl Realm {
    /// Makes a realm, with a rendezvous server on every server of the Internet.
    ///
    /// # Errors
    /// When a command fails.
    pub fn create(lab: &Lab) -> Result<Self, LabError> {
        let internet = lab.internet()?;
        let mut realm = Self {
            folder: internet.client().folder().join("realm"),
            id: String::new(),
            servers: Vec::new(),
        };
        let made = realm.operate(lab, &["realm", "create", "lab"])?;
        realm.id = text(&made, "id")?;
        for index in 0..internet.servers().len() {
            let server = Rendezvous::start(lab, index, &realm.id)?;
            // One of each family.
            let all = internet.server(index)?.addresses();
            let of = |v6: bool| all.iter().find(|address| address.contains(':') == v6);
            let addresses: Vec<&String> = [of(false), of(true)].into_iter().flatten().collect();
            let at = |prefix: &str, port: u16| -> Vec<String> {
                let written = addresses.iter().map(|address| match address.contains(':') {
                    true => format!("{prefix}[{address}]:{port}"),
                    false => format!("{prefix}{address}:{port}"),
                });
                written.collect()
            };
            let all = [
                at("", UDP_PORT),
                at("tcp/", TCP_PORT),
                at("stun/", STUN_PORT),
            ];
            let all = all.concat();
            let fingerprint = server.fingerprint();
            let mut add = vec!["realm", "add-server", &fingerprint];
            add.extend(all.iter().map(String::as_str));
            realm.operate(lab, &add)?;
            realm.servers.push(server);
        }
        realm.publish(lab)?;
        Ok(realm)
    }

    /// Returns the operator's folder, with the realm's key.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Runs a command of the operator, at the client's site.
    ///
    /// # Errors
    /// When it fails.
    pub fn operate(&self, lab: &Lab, words: &[&str]) -> Result<Value, LabError> {
        let mut command = Command::new(own_binary("longhaul")?);
        command.arg("--json").args(words);
        command.arg("--folder").arg(&self.folder);
        let said = lab.internet()?.client().output(&mut command)?;
        serde_json::from_str(&said).map_err(|error| LabError::Answer {
            what: format!("`longhaul {}`", words.join(" ")),
            message: format!("{error}: {}", said.trim()),
        })
    }

    /// Signs what has changed, and gives it to the servers. Returns the version.
    ///
    /// # Errors
    /// When no server takes it.
    pub fn publish(&self, lab: &Lab) -> Result<u64, LabError> {
        let published = self.operate(lab, &["realm", "publish"])?;
        let version = published["version"].as_u64();
        version.ok_or_else(|| unfit(&published, "version"))
    }

    /// Makes a server the realm's arbiter.
    ///
    /// # Errors
    /// When the plan of the realm cannot be changed, or is not published.
    pub fn set_arbiter(&mut self, lab: &Lab, index: usize) -> Result<(), LabError> {
        let server = self.server(index)?;
        let named = [
            ("server", server.fingerprint()),
            ("store", server.field("store=")),
        ];
        let arbiter = named.map(|(key, value)| (key.to_owned(), value.into()));
        let arbiter: toml::Table = arbiter.into_iter().collect();
        let mut plan = self.plan()?;
        plan.insert("arbiter".to_owned(), arbiter.into());
        self.publish_plan(lab, &plan)
    }

    /// Replaces the members of a network.
    ///
    /// # Errors
    /// When the plan of the realm has no such network, or is not published.
    pub fn set_members(
        &self,
        lab: &Lab,
        network: &str,
        members: &[&Agent],
    ) -> Result<(), LabError> {
        let mut plan = self.plan()?;
        let of_plan = plan.get_mut("network");
        let entry = of_plan.and_then(|networks| networks.get_mut(network)?.as_table_mut());
        let entry = entry.ok_or_else(|| LabError::Which(format!("no network {network}")))?;
        let names = members.iter().map(|agent| agent.name().into());
        let names: Vec<toml::Value> = names.collect();
        entry.insert("members".to_owned(), names.into());
        self.publish_plan(lab, &plan)
    }

    /// Reads the plan of the realm, as its operator edits it.
    fn plan(&self) -> Result<toml::Table, LabError> {
        let path = self.folder.join("realm.toml");
        let text = fs::read_to_string(&path).during(|| format!("read {}", path.display()))?;
        text.parse().map_err(|error| LabError::Answer {
            what: path.display().to_string(),
            message: format!("{error}"),
        })
    }

    fn publish_plan(&self, lab: &Lab, plan: &toml::Table) -> Result<(), LabError> {
        let path = self.folder.join("realm.toml");
        fs::write(&path, plan.to_string()).during(|| format!("write {}", path.display()))?;
        self.publish(lab).map(drop)
    }

    /// Lets the hosts of agents join under their own names.
    ///
    /// # Errors
    /// When one is not taken.
    pub fn join(&self, lab: &Lab, agents: &[&Agent]) -> Result<(), LabError> {
        for agent in agents {
            let invite = ["host", "invite", agent.name(), "--site", agent.name()];
            let token = text(&self.operate(lab, &invite)?, "token")?;
            agent.run(&["host", "join", &token])?;
        }
        self.publish(lab).map(drop)
    }

    /// Makes a network with these members, and waits until it is open on each.
    ///
    /// # Errors
    /// When a command fails, or a host has no port in time.
    pub fn create_network(
        &self,
        lab: &Lab,
        name: &str,
        members: &[&Agent],
    ) -> Result<(), LabError> {
        self.operate(lab, &["network", "create", name])?;
        let names: Vec<&str> = members.iter().map(|agent| agent.name()).collect();
        self.operate(lab, &[&["network", "add", name][..], &names].concat())?;
        self.publish(lab)?;
        for agent in members {
            let mut said = Value::Null;
            let open = wait_until(PUBLISH_LIMIT, || {
                said = shown(agent, &["host", "realm"]).unwrap_or(Value::Null);
                bridge_in(&said, name).is_some()
            });
            if !open {
                return Err(LabError::Answer {
                    what: format!("network {name} on {}", agent.name()),
                    message: format!("it is not open: {said}"),
                });
            }
        }
        Ok(())
    }

    /// Returns the bridge of a network on a host.
    ///
    /// # Errors
    /// When the network is not open there.
    pub fn bridge(&self, agent: &Agent, network: &str) -> Result<String, LabError> {
        let said = shown(agent, &["host", "realm"])?;
        bridge_in(&said, network).ok_or_else(|| unfit(&said, "bridge"))
    }

    /// Ends a server without warning.
    ///
    /// # Errors
    /// When there is none of that number.
    pub fn kill_server(&mut self, index: usize) -> Result<(), LabError> {
        let server = self.server(index)?;
        // It may have ended already.
        let _ = server.process.kill();
        let waited = server.process.wait();
        waited
            .map(drop)
            .during(|| "wait for a rendezvous server".to_owned())
    }

    /// Starts a server again that was killed.
    ///
    /// # Errors
    /// When it does not start.
    pub fn restart_server(&mut self, lab: &Lab, index: usize) -> Result<(), LabError> {
        let id = self.id.clone();
        let server = self.server(index)?;
        let host = lab.internet()?.server(server.index)?;
        server.process = spawn(host, &id, &server.log)?;
        server.starts += 1;
        server.wait()
    }

    fn server(&mut self, index: usize) -> Result<&mut Rendezvous, LabError> {
        let none = || LabError::Which(format!("this realm has no server {index}"));
        self.servers.get_mut(index).ok_or_else(none)
    }
}

/// Returns how a host reaches others, by their names, as [`path_to`] does for one.
///
/// # Errors
/// When its agent does not answer.
pub fn paths_of(agent: &Agent) -> Result<BTreeMap<String, String>, LabError> {
    let said = shown(agent, &["hosts"])?;
    let members = said["members"].as_array().into_iter().flatten();
    let reached = members.filter_map(|member| {
        let name = member["name"].as_str()?.to_owned();
        Some((name, path_of(member).0?))
    });
    Ok(reached.collect())
}

/// Returns how a host reaches another: `direct`, `relayed`, or nothing before the other one has
/// answered a sealed probe; and why not better.
///
/// # Errors
/// When its agent does not answer.
pub fn path_to(agent: &Agent, to: &str) -> Result<(Option<String>, String), LabError> {
    let said = shown(agent, &["hosts"])?;
    let members = said["members"].as_array();
    let member = members
        .into_iter()
        .flatten()
        .find(|member| member["name"] == to);
    Ok(member.map(path_of).unwrap_or_default())
}

fn path_of(member: &Value) -> (Option<String>, String) {
    let path = &member["path"];
    let word = |key: &str| path[key].as_str().map(str::to_owned);
    let kind = word("kind").filter(|_| path["round_trip_us"].is_u64());
    (kind, word("text").unwrap_or_default())
}

fn shown(agent: &Agent, words: &[&str]) -> Result<Value, LabError> {
    let said = agent.run(&[&["--json"], words].concat())?;
    serde_json::from_str(&said).map_err(|error| LabError::Answer {
        what: format!("`longhaul {}` on {}", words.join(" "), agent.name()),
        message: error.to_string(),
    })
}

fn bridge_in(said: &Value, network: &str) -> Option<String> {
    let networks = said["realm"]["networks"].as_array()?;
    let found = networks.iter().find(|found| found["name"] == network)?;
    found["bridge"].as_str().map(str::to_owned)
}

fn text(said: &Value, key: &str) -> Result<String, LabError> {
    let text = said[key].as_str().map(str::to_owned);
    text.ok_or_else(|| unfit(said, key))
}

fn unfit(said: &Value, key: &str) -> LabError {
    LabError::Answer {
        what: "a command of the product".to_owned(),
        message: format!("no `{key}`: {said}"),
    }
}
